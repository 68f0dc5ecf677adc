"""EMA weights against ema_pytorch, call by call."""

import copy
import json

import ema_pytorch
import pytest
import torch
from fake_backend import FakeBackend
from tiny_task import Tiny
from torch import nn
from torch.nn.utils import spectral_norm

from tpukit.hardware.modules import move_towards
from tpukit.train.config import TrainConfig
from tpukit.train.learner import build_learner
from tpukit.train.optimizer import EMASchedule
from tpukit.train.plan import TrainingRequest
from tpukit.train.run import train_run
from tpukit.train.run_folder import RunFolder, open_run, read_config, write_config
from tpukit.train.task import PlanSettings


def public_ema(model, version, beta, every, warmup):
    """ema_pytorch's own; 0.8 takes its first call's copy for the one that 0.5.2 makes later."""
    ema = ema_pytorch.EMA(model, beta=beta, update_every=every, update_after_step=warmup)
    if version == "ema_pytorch":
        ema.initted.fill_(True)
    return ema


@pytest.mark.parametrize("updates", ["ema_pytorch", "ema_pytorch-0.5.2"])
@pytest.mark.parametrize(("every", "warmup"), [(1, 4), (2, 4), (3, 4), (10, 100)])
def test_ema_weights_equal_those_of_ema_pytorch(updates, every, warmup):
    torch.manual_seed(0)
    backend, task = FakeBackend(), Tiny(noise=0.0)
    learner = build_learner(task, backend, task.build_model(backend), TrainConfig(
        ema_decay=0.9, ema_every=every, ema_warmup=warmup, ema_updates=updates))  # fmt: skip
    public = public_ema(backend.unwrap(learner.model), updates, 0.9, every, warmup)
    [batch] = task.probe_batches(PlanSettings(4, 4, 1, 0))
    batch["x"] += 1.0
    for done in range(1, warmup + 4 * every + 1):
        learner.train_step([batch], 0.05)
        public.update()
        # While the weights are copied, those of tpukit are copied after each step.
        if done > warmup // every * every or (done - 1) % every == 0:
            for name, value in public.ema_model.named_parameters():
                torch.testing.assert_close(learner.ema.weights[name], value, rtol=0, atol=1e-7)
    assert not torch.equal(
        learner.ema.weights["0.weight"], dict(learner.model.named_parameters())["0.weight"]
    )


class Bounded(Tiny):
    """A network under spectral norm, in the old form and as a parametrization."""

    name = "bounded"

    def build_model(self, ops):
        torch.manual_seed(0)
        return nn.Sequential(
            spectral_norm(nn.Linear(8, 16)), nn.ReLU(),
            nn.utils.parametrizations.spectral_norm(nn.Linear(16, 2)),
        )  # fmt: skip


def test_a_run_says_once_what_is_copied_and_validates_with_it(tmp_path):
    lines = []
    config = TrainConfig(
        max_steps=80, global_batch_size=16, num_workers=0, ema_decay=0.99, ema_warmup=0, lr=0.03
    )
    request = TrainingRequest(Bounded(), config, RunFolder(tmp_path / "run"))
    train_run(request, FakeBackend(), lines.append)
    buffers = (
        "0.weight_u, 0.weight_v, 2.parametrizations.weight.0._u, 2.parametrizations.weight.0._v"
    )
    assert [line for line in lines if "copied are" in line] == [
        f"EMA weights: parameters and running statistics are averaged; copied are {buffers}."
    ]
    rows = [json.loads(line) for line in request.folder.metrics.read_text().splitlines()]
    # Averaged, the vectors fit no weights: 20 to 470.
    assert max(row["valid_loss"] for row in rows if row["kind"] == "valid") < 2


@pytest.mark.parametrize("weight", [0.25, torch.tensor(0.25)])
def test_complex_weights_are_averaged(weight):
    average, source = torch.tensor([4.0 + 8.0j]), nn.Parameter(torch.tensor([8.0 - 4.0j]))
    move_towards([average], [source], weight)
    assert average.item() == 5.0 + 5.0j


def test_runs_of_before_update_at_multiples():
    schedule = EMASchedule(decay=0.75, every=2, warmup=4, updates="multiples")
    decays = {2: 0, 4: 0, 6: 1 - 3 ** (-2 / 3), 8: 1 - 5 ** (-2 / 3), 12: 0.75}
    assert all(schedule.weight(step) == pytest.approx(1 - d) for step, d in decays.items())
    assert [schedule.weight(step) for step in (1, 3, 5, 7)] == [0, 0, 0, 0]
    constant = EMASchedule(decay=0.75, every=2, warmup=0, updates="multiples")
    assert [constant.weight(step) for step in (1, 2, 3, 4)] == [0, 0.25, 0, 0.25]


def run_of(tmp_path, steps, **settings):
    config = TrainConfig(max_steps=steps, global_batch_size=16, num_workers=0, **settings)
    request = TrainingRequest(Tiny(), config, RunFolder(tmp_path / "run"))
    train_run(request, FakeBackend(), lambda message: None)
    return request.folder


def trained_weights(folder):
    return open_run(folder.path, lambda message: None).checkpoint.tensors("model")


def opened_weights(folder):
    return open_run(folder.path, lambda message: None).weights()


@pytest.mark.parametrize("updates", ["ema_pytorch", "ema_pytorch-0.5.2", "multiples"])
def test_a_run_without_an_update_is_used_with_its_trained_weights(tmp_path, updates):
    folder = run_of(tmp_path, 8, ema_decay=0.9, ema_every=10, ema_updates=updates)
    trained, opened = trained_weights(folder), opened_weights(folder)
    assert all(torch.equal(opened[name], trained[name]) for name in trained)


def test_so_is_a_run_that_does_not_record_when_it_updates(tmp_path):
    folder = run_of(tmp_path, 8, ema_decay=0.9, ema_every=10, ema_updates="multiples")
    tables = copy.deepcopy(read_config(folder))
    del tables["train"]["ema_updates"]
    write_config(folder, tables)
    trained, opened = trained_weights(folder), opened_weights(folder)
    assert all(torch.equal(opened[name], trained[name]) for name in trained)


def test_a_run_with_updates_is_used_with_its_ema_weights(tmp_path):
    folder = run_of(tmp_path, 12, ema_decay=0.9, ema_every=2, ema_warmup=4)
    trained, opened = trained_weights(folder), opened_weights(folder)
    assert not torch.equal(opened["0.weight"], trained["0.weight"])
