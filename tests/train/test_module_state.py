"""Modules with state of their own, beside a loop of plain torch: EMA, resume, test, export."""

import copy
import re
from pathlib import Path

import pytest
import torch
from fake_backend import FakeBackend
from stateful_modules import MODULES
from tiny_task import Rows, Tiny
from torch import nn

import tpukit
from tpukit.errors import CheckpointError, UsageError
from tpukit.hardware.modules import running_statistics
from tpukit.train.checkpoint import list_checkpoints, open_checkpoint
from tpukit.train.config import TrainConfig
from tpukit.train.module_state import load_weights
from tpukit.train.plan import TrainingRequest
from tpukit.train.run import train_run
from tpukit.train.run_folder import RunFolder

DECAY, LR, STEPS = 0.75, 0.05, 6


class Stateful(Tiny):
    """Trains one of the modules; keeps the batches that its loss was given in train mode."""

    name = "stateful"

    def __init__(self, kind="queue", data_path=""):
        super().__init__(samples=24)
        self.kind, self.batches = kind, []

    def build_model(self, ops):
        torch.manual_seed(0)
        return MODULES[self.kind]()

    def loss(self, model, batch):
        if model.training:
            self.batches.append({name: tensor.clone() for name, tensor in batch.items()})
        return {"loss": (model(batch["x"]).float() - batch["y"]).square().mean(1)}


def train(task, folder, steps, **settings):
    config = TrainConfig(
        max_steps=steps, global_batch_size=8, num_workers=0, ema_decay=DECAY, ema_warmup=0,
        optimizer="sgd", momentum=0.9, weight_decay=0.0, lr=LR, clip_norm=0.0, ckpt_every=3,
        schedule="constant", **settings,
    )  # fmt: skip
    request = TrainingRequest(task, config, RunFolder(folder))
    lines = []
    train_run(request, FakeBackend(), lines.append)
    return lines


def by_hand(kind, batches):
    """The trained model, and its EMA: parameters and running statistics averaged, else a copy."""
    model = Stateful(kind).build_model(None)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, LR, momentum=0.9)
    average = copy.deepcopy([p.detach() for p in trained])
    means = copy.deepcopy({n: model.get_buffer(n) for n in running_statistics(model)})
    for batch in batches:
        loss = (model(batch["x"]) - batch["y"]).square().mean(1)
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()
        torch._foreach_lerp_(average, [p.detach() for p in trained], 1 - DECAY)
        for name, mean in means.items():
            mean.lerp_(model.get_buffer(name), 1 - DECAY)
    averaged = Stateful(kind).build_model(None)
    averaged.load_state_dict(model.state_dict())
    of_average = [p for p in averaged.parameters() if p.requires_grad]
    torch._foreach_copy_([p.data for p in of_average], average)
    for name, mean in means.items():
        averaged.get_buffer(name).copy_(mean)
    return model, averaged


def newest(folder):
    return list_checkpoints(folder / "checkpoints")[0]


def files(folder):
    return {f.name: f.read_bytes() for f in newest(folder).glob("*") if f.name != "state.json"}


def assert_same(kind, model, state):
    """A model's state dict beside one that names tied weights once."""
    fresh = Stateful(kind).build_model(None)
    load_weights(fresh, state, "it")
    for name, value in fresh.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value)


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_module_is_trained_averaged_resumed_tested_and_exported(kind, tmp_path, monkeypatch):
    whole, stopped, out = tmp_path / "whole", tmp_path / "stopped", tmp_path / "out"
    task = Stateful(kind)
    train(task, whole, STEPS)
    assert len(task.batches) == STEPS
    model, averaged = by_hand(kind, task.batches)
    assert_same(kind, model, open_checkpoint(newest(whole)).weights())
    opened = tpukit.load(newest(whole), task=Stateful(kind))
    assert_same(kind, averaged, opened.weights())

    train(Stateful(kind), stopped, STEPS // 2)
    train(Stateful(kind), stopped, STEPS)
    assert files(stopped) == files(whole)

    monkeypatch.setattr(Tiny, "draw", lambda self, sample, rng: sample)
    valid = Rows(10)
    x, y = (torch.stack([torch.from_numpy(valid[i][n]) for i in range(10)]) for n in "xy")
    with torch.no_grad():
        expected = averaged.eval()(x)
        torch.testing.assert_close(opened.model(x), expected)
    fields = tpukit.evaluate(opened, hw="cpu", precision="fp32", log=lambda line: None)
    error = (expected - y).square().mean()
    torch.testing.assert_close(torch.tensor(fields["metrics"]["loss"]), error.float())

    opened.export(out)
    built = Stateful(kind).build_model(None)
    monkeypatch.chdir(out)
    by_torch, _ = re.findall(r"```python\n(.*?)```", Path("README.md").read_text(), re.DOTALL)
    exec(by_torch, {"model": built})
    with torch.no_grad():
        torch.testing.assert_close(built(x), expected)


class Odd(nn.Linear):
    """Its extra state is an object of its own."""

    def get_extra_state(self):
        return Rows(1)

    def set_extra_state(self, state):
        pass


class OneWay(nn.Linear):
    def get_extra_state(self):
        return 1


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Odd, "state dict holds a Rows as '1._extra_state', which `torch.load\\(..., weights_only"),
        (OneWay, "whose '1', a OneWay, has `get_extra_state` and no `set_extra_state`"),
    ],
)
def test_extra_state_that_no_checkpoint_can_hold_is_an_error_before_the_first_step(
    kind, message, tmp_path, monkeypatch
):
    monkeypatch.setitem(MODULES, "odd", lambda: nn.Sequential(nn.Linear(8, 8), kind(8, 2)))
    task = Stateful("odd")
    with pytest.raises(UsageError, match=message):
        train(task, tmp_path / "run", 3)
    assert not task.batches


def test_a_checkpoint_of_before_is_read_and_what_it_lacks_is_said(tmp_path, capfd):
    """It holds parameters and buffers; an extra state was lost."""
    model = MODULES["extra state"]()
    load_weights(model, {n: p.detach() + 1 for n, p in model.named_parameters()}, "step-3")
    assert "Warning: step-3 holds no extra state of the model" in capfd.readouterr().err
    fresh = MODULES["normalisation"]()
    load_weights(fresh, {**dict(fresh.named_parameters()), **dict(fresh.named_buffers())}, "it")
    assert not capfd.readouterr().err


def test_every_difference_is_named_but_for_buffers_that_take_any_size():
    state = dict(MODULES["memory"]().state_dict())
    state |= {"memory": torch.ones(3, 2), "layer.weight": torch.ones(3, 8), "other": torch.ones(1)}
    del state["layer.bias"]
    with pytest.raises(CheckpointError) as caught:
        load_weights(MODULES["memory"](), state, "It")
    assert caught.value.message == (
        "It does not fit this model: it lacks layer.bias; has an unknown other; has layer.weight of"
        " shape (3, 8), not (2, 8) (3 differences)."
    )
