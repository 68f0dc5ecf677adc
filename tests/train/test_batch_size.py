"""Splitting a global batch over devices and micro-batches, by what memory holds."""

import multiprocessing
import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from fake_backend import FakeBackend
from tiny_task import Tiny
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import tpukit
from tpukit.errors import ConfigError, UsageError
from tpukit.hardware.backend import DeviceUsage
from tpukit.hardware.memory import Memory
from tpukit.probe.gpu_memory.run_costs import predict_costs
from tpukit.train import batch_size
from tpukit.train.batch_size import BatchSplit, _fastest_that_fits, divisors, split_batch
from tpukit.train.config import TrainConfig
from tpukit.train.plan import TrainingRequest, plan_run
from tpukit.train.run import train_run
from tpukit.train.run_folder import RunFolder
from tpukit.train.task import Datasets, MasterAdamW, PlanSettings, Task, TrainingDefaults

MIB = 2**20


@pytest.mark.parametrize(
    ("size", "devices", "accumulate", "most", "rows", "steps"),
    [(256, 2, None, 16, 16, 8), (256, 1, None, None, 256, 1), (64, 8, None, 16, 8, 1),
     (64, 8, 4, None, 2, 4), (7, 1, None, 3, 1, 7)],
)  # fmt: skip
def test_the_effective_batch_stays(size, devices, accumulate, most, rows, steps):
    split = split_batch(size, devices, accumulate, most)
    assert (split.rows_per_device, split.accumulate) == (rows, steps)
    assert split.rows_per_device * split.accumulate * split.devices == size


@pytest.mark.parametrize(
    ("size", "devices", "accumulate", "nearest"),
    [(100, 8, None, "96 or 104"), (3, 8, None, "8"), (60, 4, 4, "48 or 64")],
)
def test_what_does_not_divide_names_the_nearest(size, devices, accumulate, nearest):
    with pytest.raises(ConfigError) as caught:
        split_batch(size, devices, accumulate)
    assert nearest in caught.value.hint


class Contrastive(Task):
    """SimCLR's loss (Chen et al., 2020) of two views, over a model with BatchNorm."""

    name = "contrastive"
    defaults = TrainingDefaults(global_batch_size=64, max_steps=1, lr=0.0)

    def build_model(self, ops):
        return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))

    def datasets(self):
        rng = np.random.default_rng(0)
        views = rng.standard_normal((128, 2, 8), dtype=np.float32)
        return Datasets([{"views": view} for view in views], None)

    def loss(self, model, batch):
        return {"loss": simclr_loss(model(batch["views"].transpose(0, 1).flatten(0, 1)))}


def simclr_loss(outputs):
    z = F.normalize(outputs, dim=1)
    scores = (z @ z.T / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), float("-inf"))
    return F.cross_entropy(scores, torch.arange(len(z)).roll(len(z) // 2))


def test_a_batch_is_not_cut_without_a_reason(tmp_path):
    """The loss over all 64 samples, normalized by all 64, as a plain loop computes it."""
    lines = []
    run = tpukit.fit(Contrastive(), results_dir=str(tmp_path / "run"), hw="cpu", log=lines.append)
    torch.manual_seed(0)
    task = Contrastive()
    model, data = task.build_model(None), task.datasets().train
    config = TrainConfig(global_batch_size=64)
    request = TrainingRequest(task, config, RunFolder(tmp_path / "other"))
    [micro] = plan_run(request, FakeBackend()).batches.step(0)
    views = torch.stack([torch.from_numpy(data[key.sample]["views"]) for key in micro.keys])
    expected = simclr_loss(model(views.transpose(0, 1).flatten(0, 1))).item()
    assert run.loss == pytest.approx(expected, rel=1e-4)
    assert not [line for line in lines if "is cut" in line]


def test_a_cut_is_said_with_its_reason_and_what_it_changes(tmp_path):
    lines = []
    settings = {"results_dir": str(tmp_path / "run"), "hw": "cpu", "log": lines.append}
    tpukit.fit(Contrastive(), accumulate=4, **settings)
    [line] = [line for line in lines if "is cut" in line]
    assert "64 samples is cut into 4 micro-batches: --accumulate 4" in line
    assert "BatchNorm normalizes by at most 16" in line and "sees 16" in line


def test_the_task_may_ask_for_small_micro_batches(tmp_path):
    class Careful(Tiny):
        defaults = replace(Tiny.defaults, rows_per_device=4)

    request = TrainingRequest(Careful(), TrainConfig(global_batch_size=16), RunFolder(tmp_path))
    split = plan_run(request, FakeBackend()).split
    assert (split.accumulate, split.reason) == (4, "the task's rows_per_device is 4")


# -- memory --------------------------------------------------------------------------------------
class Wide(Tiny):
    """Saves 2 MiB a sample for its backward pass: sixteen activations of 32,768 floats."""

    name = "wide"
    defaults = replace(Tiny.defaults, rows_per_device=None)

    def build_model(self, ops):
        self.ops = ops
        return nn.Sequential(
            nn.Linear(8, 32768), *[nn.Tanh() for _ in range(16)], nn.Linear(32768, 2)
        )


class SmallDevice(FakeBackend):
    """A device with 64 MiB."""

    def usage(self):
        return DeviceUsage(Memory(0, 0, 64 * MIB))


def request_of(task, folder, **settings):
    config = TrainConfig(**settings)
    return TrainingRequest(task, config, RunFolder(folder), predict_costs=predict_costs)


def split_of(task, backend, folder, size=64):
    return plan_run(request_of(task, folder, global_batch_size=size), backend).split


def test_a_batch_is_cut_where_memory_demands_it(tmp_path):
    split = split_of(Wide(), SmallDevice(), tmp_path)
    # 2 MiB a sample and 6 MiB of weights, gradients and moments: 16 samples fit in 54 MiB.
    assert split.rows_per_device == 16 and "64 samples a device would take" in split.reason
    assert "of 64 MiB" in split.reason
    assert split_of(Wide(), FakeBackend(), tmp_path).accumulate == 1


def examples_of(task):
    return lambda rows: task.probe_batches(PlanSettings(rows, rows, 1, 0))


def needed(task, backend, rows, accumulate=1, **settings):
    """Bytes that a step takes, with the batches that a run would have."""
    costs = predict_costs(task, TrainConfig(**settings), backend, examples_of(task))
    return costs.memory_bytes(rows, accumulate)


def test_the_estimate_is_the_peak_of_live_tensors():
    """By hand, at the start of the backward pass: 16 tanh outputs, the gradients of two, weights,
    two moments and the last layer's gradient; after another micro-batch all gradients."""
    model = Wide().build_model(None)
    weights, last = (sum(p.nbytes for p in part.parameters()) for part in (model, model[-1]))
    activation = 10 * 32768 * 4
    one, two = (needed(Wide(), FakeBackend(), 10, accumulate) for accumulate in (1, 2))
    assert one == pytest.approx(3 * weights + last + 18 * activation, rel=0.001)
    assert two - one == pytest.approx(weights - last, rel=0.01)


def test_recomputed_parts_keep_their_inputs_alone():
    class Recomputing(Wide):
        def loss(self, model, batch):
            first, last = model[0], model[-1]
            hidden = first(batch["x"])
            for half in (model[1:9], model[9:-1]):
                hidden = self.ops.recompute(half, hidden)
            return {"loss": (last(hidden) - batch["y"]).square().mean(1)}

    activation = 10 * 32768 * 4
    plain = needed(Wide(), FakeBackend(), 10)
    # Eight of sixteen come back at a time, beside the inputs of both halves.
    kept = needed(Recomputing(), SmallCheckpointingDevice(), 10)
    assert kept - plain == pytest.approx(-6 * activation, abs=activation / 2)
    # A CPU without a limit does not recompute.
    assert needed(Recomputing(), FakeBackend(), 10) == pytest.approx(plain, rel=0.01)


class Choosing(Wide):
    """Sixteen activations are kept, or computed again."""

    def __init__(self, recompute="auto"):
        super().__init__()
        self.recompute = recompute

    def forms(self):
        return [Choosing(choice) for choice in (False, True)]

    def loss(self, model, batch):
        first, last = model[0], model[-1]
        run = self.ops.recompute if self.recompute is True else lambda part, x: part(x)
        return {"loss": (last(run(model[1:-1], first(batch["x"]))) - batch["y"]).square().mean(1)}


class SmallCheckpointingDevice(SmallDevice):
    def recompute(self, function, *tensors):
        return checkpoint(function, *tensors, use_reentrant=False)


def test_memory_chooses_among_the_forms_of_a_task(tmp_path):
    """Cut where that is enough; else, or where nothing is known, the form in the least memory."""

    # 2 MiB a sample and 6 MiB of weights, gradients and moments, or 0.4 MiB and 8 MiB.
    device = SmallCheckpointingDevice()
    for rows, accumulate, choice in ((16, 1, False), (32, None, False), (32, 1, True)):
        request = request_of(Choosing(), tmp_path, global_batch_size=rows, accumulate=accumulate)
        plan = plan_run(request, device)
        assert plan.task.recompute is choice
        assert plan.choice == (f"recompute = {choice}", "estimated for 64 MiB of a device")
        assert plan.split.accumulate == (accumulate or 2)
    device.usage = lambda: DeviceUsage(None)
    for wrong, told in (((), "a tuple"), (None, "None"), ([1], "a list")):
        task = Choosing()
        task.forms = lambda wrong=wrong: wrong
        with pytest.raises(UsageError, match=f"returned {told}"):
            plan_run(request_of(task, tmp_path), device)
    plan = plan_run(request_of(Choosing(), tmp_path), device)
    assert plan.task.recompute is True and "is not known" in plan.choice[1]


class Deep(Task):
    """Thirty-two layers of 128 x 128, whose inputs are kept, or computed again in fours."""

    def __init__(self, recompute="auto"):
        super().__init__()
        self.recompute = recompute

    def datasets(self):
        return Datasets([], None)

    def probe_batches(self, settings):
        rows = settings.micro_rows
        return [{"x": torch.zeros(rows, 128), "mask": torch.ones(rows)}]

    def forms(self):
        return [Deep(choice) for choice in (False, True)]

    def build_model(self, ops):
        self.ops = ops
        layers = [nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(32)]
        return nn.Sequential(*layers)

    def loss(self, model, batch):
        x = batch["x"]
        for place in range(0, 32, 4):
            part = model[place : place + 4]
            x = self.ops.recompute(part, x) if self.recompute is True else part(x)
        return {"loss": x.square().mean(1)}


class Half(Deep):
    """Weights and gradients in bf16, master copies and moments in fp32."""

    def build_model(self, ops):
        return super().build_model(ops).bfloat16()

    def loss(self, model, batch):
        return super().loss(model, {"x": batch["x"].bfloat16()})

    def build_optimizer(self, groups, settings):
        return MasterAdamW(groups, settings.lr)


def test_bytes_a_weight_are_those_of_its_optimizer():
    """Beside one gradient at a time in fp32, a 32nd of all; activations of a row are 1 %."""
    count = sum(p.numel() for p in Deep().build_model(None).parameters())
    for task, by_hand in ((Deep(False), 4 + 4 + 8), (Half(False), 2 + 2 + 4 + 8 + 4 / 32)):
        assert needed(task, FakeBackend(), 1) / count == pytest.approx(by_hand, rel=0.02)


class Named(FakeBackend):
    """Takes itself for other hardware."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind


def test_only_a_gpu_has_workspaces_of_cuda_and_an_allocator():
    cpu, tpu, gpu = (needed(Wide(), Named(kind), 10) for kind in ("cpu", "tpu", "gpu"))
    # cuBLAS' workspace for a thread, and segments of 20 MiB at the most.
    assert tpu == cpu and 8 * MIB < gpu - cpu < 30 * MIB


class Moved(TorchDispatchMode):
    """Bytes of a step's operators that make a tensor or change one."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            leaves = tree_leaves((args, kwargs, result))
            self.bytes += sum(x.nbytes for x in leaves if isinstance(x, torch.Tensor))
        return result


def moved_by_a_step(form, rows, parts):
    """Bytes of `parts` real forward and backward passes, and AdamW's step over lists."""
    model = form.build_model(SmallCheckpointingDevice())
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    with Moved() as moved:
        for _ in range(parts):
            form.loss(model, {"x": torch.randn(rows // parts, 128)})["loss"].sum().backward()
        optimizer.step()
    return moved.bytes


@pytest.mark.slow
def test_the_form_that_moves_the_fewest_bytes_is_trained():
    """Small micro-batches read the weights too often, and recomputation reads activations again."""
    rows, forms, device = 512, Deep().forms(), SmallCheckpointingDevice()
    costs = {
        form.recompute: predict_costs(form, TrainConfig(), device, examples_of(form))
        for form in forms
    }

    def fewest_parts(form, limit):
        memory = costs[form.recompute].memory_bytes
        return next(n for n in divisors(rows) if memory(rows // n, n) <= limit)

    found = []
    for limit in (int(mib * MIB) for mib in (9.4, 10.7, 13.2, 16)):
        place, parts, _ = _fastest_that_fits(
            forms, BatchSplit(rows, 1, 1), lambda form: costs[form.recompute], limit, cuts=True
        )
        each = [fewest_parts(form, limit) for form in forms]
        moved = [moved_by_a_step(form, rows, n) for form, n in zip(forms, each, strict=True)]
        assert (place, parts) == (moved.index(min(moved)), each[place])
        found.append(place)
    assert found == [1, 1, 0, 0]


def test_a_task_that_cannot_be_traced_is_not_cut(tmp_path):
    class Reading(Wide):
        def loss(self, model, batch):
            if batch["x"].sum().item() > 1e9:
                raise AssertionError
            return super().loss(model, batch)

    assert split_of(Reading(), SmallDevice(), tmp_path).accumulate == 1


def test_an_estimate_that_hangs_is_given_up_and_said(monkeypatch, capsys):
    monkeypatch.setattr(batch_size, "ESTIMATE_SECONDS", 1.0)
    assert batch_size.in_worker(partial(time.sleep, 600), late="nothing is cut")() is None
    assert "within 1 s: nothing is cut" in capsys.readouterr().err
    assert multiprocessing.active_children() == []


def test_a_model_whose_constructor_reads_values_is_traced(tmp_path):
    class Reading(Wide):
        def build_model(self, ops):
            assert torch.linspace(0, 1, 3).tolist() == [0.0, 0.5, 1.0]
            return super().build_model(ops)

    assert split_of(Reading(), SmallDevice(), tmp_path).rows_per_device == 16


def test_a_resumed_run_keeps_its_micro_batches(tmp_path):
    settings = {"results_dir": str(tmp_path / "run"), "hw": "cpu", "log": lambda line: None}
    tpukit.fit(Tiny(), max_steps=2, accumulate=8, **settings)
    lines = []
    tpukit.fit(Tiny(), max_steps=3, **{**settings, "log": lines.append})
    [line] = [line for line in lines if "is cut" in line]
    assert "cut into 8 micro-batches: as the run did before" in line


def test_a_resumed_run_keeps_its_form(tmp_path):
    """The estimate may differ the second time: here nothing is known any more."""
    device, lines = SmallCheckpointingDevice(), []
    for steps in (1, 2):
        config = {"global_batch_size": 16, "max_steps": steps, "num_workers": 0}
        train_run(request_of(Choosing(), tmp_path, **config), device, lines.append)
        device.usage = lambda: DeviceUsage(None)
    chosen = [line for line in lines if "recompute = " in line]
    assert chosen == [
        "recompute = False: estimated for 64 MiB of a device",
        "recompute = False: as the run did before",
    ]


# -- operations ------------------------------------------------------------------------------------
def linear(rows, width, out):
    """Operations of a product: a multiplication and an addition each."""
    return 2 * rows * width * out


LAYERS = {
    # The first layer needs no gradient of its input: two products, else three.
    "mlp": (nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2)),
            2 * linear(1, 8, 32) + 3 * linear(1, 32, 2)),
    "convolutions": (nn.Sequential(nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 6, 3, padding=1),
                                   nn.ReLU(), nn.Conv2d(6, 4, 1, stride=2), nn.Flatten(),
                                   nn.Linear(4, 2)),
                     2 * linear(4, 2 * 9, 6) + 3 * linear(1, 6, 4) + 3 * linear(1, 4, 2)),
    "attention": (nn.Sequential(nn.Unflatten(1, (4, 2)), nn.TransformerEncoderLayer(
                      2, 1, 3, dropout=0.0, batch_first=True), nn.Flatten(), nn.Linear(8, 2)),
                  2 * linear(4, 2, 6) + 2 * 3 * linear(4, 2, 4) + 3 * linear(4, 2, 2)
                  + 2 * 3 * linear(4, 2, 3) + 3 * linear(1, 8, 2)),
}  # fmt: skip
"""A model, and by hand the operations of a step for one sample."""


class KnownPeak(FakeBackend):
    def usage(self):
        return replace(super().usage(), peak_flops=1e9)


@pytest.mark.parametrize("name", LAYERS)
def test_operations_are_those_counted_by_hand(tmp_path, name):
    model, by_hand = LAYERS[name]

    class Layers(Tiny):
        def build_model(self, ops):
            return model

    def planned(backend, accumulate=None):
        request = request_of(Layers(), tmp_path, global_batch_size=16, accumulate=accumulate)
        return plan_run(request, backend)

    assert planned(KnownPeak()).operations_per_sample() == by_hand
    assert planned(KnownPeak(), accumulate=4).operations_per_sample() == by_hand
    assert planned(FakeBackend()).operations_per_sample() is None


def test_batches_that_cannot_be_made_leave_operations_unknown():
    def examples(rows):
        raise ValueError("sample 0 is damaged")

    split, config = split_batch(16, 1), TrainConfig()
    how = split, Tiny(), config, KnownPeak()
    assert batch_size.sample_operations(*how, examples, predict_costs)() is None
