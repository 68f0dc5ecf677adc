"""Optimizers of torch, timm and other packages: thirty steps beside a plain loop of torch, stopped
in the middle and gone on with.

pytest -n 0 -m slow -s tests/train/test_every_optimizer.py prints the differences as a table.
"""

import importlib
import importlib.util
import json
import warnings

import pytest
import torch
from fake_backend import FakeBackend
from tiny_task import Tiny
from torch import nn

from tpukit.errors import TpukitError
from tpukit.hardware.optimizers import has_modes
from tpukit.hardware.options import HardwareOptions
from tpukit.hardware.select import open_backend
from tpukit.train.config import TrainConfig
from tpukit.train.learner import build_learner, seed_everything, seed_loss
from tpukit.train.task import PlanSettings

RATE, STEPS, MIDDLE, ROWS = 2e-3, 30, 15, 16
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]
ON_GPU = HardwareOptions(hw="gpu", devices=1, precision="fp32", compile=False, deterministic=True)


class Optimizing(Tiny):
    """Kernels of a convolution, matrices and vectors; for some optimizers matrices alone."""

    matrices = False
    device = "cpu"

    def build_model(self, ops):
        if self.matrices:
            layers = [nn.Linear(8, 32, bias=False), nn.GELU(), nn.Linear(32, 2, bias=False)]
        else:
            layers = [
                nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 4, 1), nn.GELU(), nn.Flatten(),
                nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 2),
            ]  # fmt: skip
        return nn.Sequential(*layers)

    def build_optimizer(self, groups, settings):
        return self.make([group.options() for group in groups if group.parameters])


def batch_of(task, step):
    [batch] = task.probe_batches(PlanSettings(ROWS, ROWS, 1, 0))
    batch["x"] += torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(step))
    batch["y"] = batch["x"][:, :2].sin()
    return {name: tensor.to(task.device) for name, tensor in batch.items()}


def rate_of(step):
    return RATE * (1 - step / (2 * STEPS))


def learner_of(task, seed=0):
    seed_everything(seed)
    config = TrainConfig(lr=RATE, clip_norm=0.0, weight_decay=0.0)
    backend = FakeBackend() if task.device == "cpu" else open_backend(ON_GPU)
    learner = build_learner(task, backend, task.build_model(None), config)
    seed_everything(1)
    return learner


def train(learner, task, start, stop):
    for step in range(start, stop):
        learner.train_step([batch_of(task, step)], rate_of(step))


def trained_by_torch(task):
    """The weights after a loop as anybody writes it."""
    seed_everything(0)
    model = task.build_model(None).to(task.device)
    groups = [dict(group) for group in task.parameter_groups(model, 0.0)]
    optimizer = task.make([group for group in groups if group["params"]])
    scales = [group["lr"] / RATE for group in optimizer.param_groups]
    if has_modes(optimizer):
        optimizer.train()
    seed_everything(1)
    for step in range(STEPS):
        for group, scale in zip(optimizer.param_groups, scales, strict=True):
            group["lr"] = rate_of(step) * scale
        optimizer.zero_grad()
        # Some optimizers draw in their steps.
        seed_loss(FakeBackend(), TrainConfig().global_seed, step)
        task.loss(model, batch_of(task, step))["loss"].mean().backward()
        optimizer.step()
    return dict(model.named_parameters())


def gone_on(task):
    """A learner that stops in the middle, is looked at, saved, and goes on as another one."""
    first, second = learner_of(task), learner_of(task, seed=5)
    seed_everything(1)
    train(first, task, 0, MIDDLE)
    with first.evaluation_weights():
        pass
    state = first.optimizer_state
    values = json.loads(json.dumps(state.values()))
    tensors = {name: tensor.contiguous().clone() for name, tensor in state.tensors().items()}
    second.backend.load(second.model_tensors(), first.model_tensors())
    second.optimizer_state.restore(
        values,
        {name: tensor.to("meta") for name, tensor in tensors.items()},
        lambda rooms: second.backend.load(rooms, tensors),
    )
    second.steps_done = MIDDLE
    train(second, task, MIDDLE, STEPS)
    return second


def difference(left, right):
    return max(float((left[n] - right[n]).detach().abs().max()) for n in left)


def compared(make, *, matrices=False, device="cpu"):
    """(from torch's loop, of the resumed from the whole run), or why it is refused."""
    task = Optimizing()
    task.make, task.matrices, task.device = make, matrices, device
    try:
        whole = learner_of(task)
        train(whole, task, 0, 1)
        whole.optimizer_state.values()
    except TpukitError as refused:
        return refused.message
    train(whole, task, 1, STEPS)
    resumed = gone_on(task)
    for name, tensor in whole.optimizer_state.tensors().items():
        assert torch.equal(tensor, resumed.optimizer_state.tensors()[name]), name
    found = whole.model_tensors()
    return difference(found, trained_by_torch(task)), difference(resumed.model_tensors(), found)


def of_torch(name, **options):
    return lambda groups: getattr(torch.optim, name)(groups, lr=RATE, **options)


def of_timm(name):
    from timm.optim import create_optimizer_v2

    return lambda groups: create_optimizer_v2(
        groups, opt=name, lr=RATE, weight_decay=0.0, momentum=0.9
    )


def of_package(module, name, **options):
    return lambda groups: getattr(importlib.import_module(module), name)(groups, lr=RATE, **options)


def wrapped(module, name, inner, **options):
    return lambda groups: getattr(importlib.import_module(module), name)(inner(groups), **options)


def of_collection(name):
    """One of pytorch_optimizer, whose groups name the matrices that Muon is for."""

    def make(groups):
        from pytorch_optimizer import load_optimizer

        cls = load_optimizer(name)
        if "mu" in name or name == "adago":
            for group in groups:
                group["use_muon"] = all(p.ndim == 2 for p in group["params"])
        needed = {"ranger21": {"num_iterations": 100}, "bsam": {"num_data": 100}}
        return cls(groups, lr=RATE, **needed.get(name, {}))

    return make


SCHEDULE_FREE = {
    f"schedulefree.{name}": of_package("schedulefree", name)
    for name in ("AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree")
} | {
    "schedulefree.ScheduleFreeWrapper": wrapped(
        "schedulefree", "ScheduleFreeWrapper", of_torch("SGD"), momentum=0.9
    )
}
PACKED = {
    f"bitsandbytes.{name}": of_package("bitsandbytes.optim", name, weight_decay=0.0, **options)
    for name, options in (
        ("PagedAdamW", {}), ("AdamW8bit", {"min_8bit_size": 64}),
        ("PagedAdamW8bit", {"min_8bit_size": 64}),
    )
}  # fmt: skip
OTHERS = {
    **SCHEDULE_FREE,
    "prodigyopt.Prodigy": of_package("prodigyopt", "Prodigy"),
    "pytorch_optimizer.Lookahead": wrapped(
        "pytorch_optimizer", "Lookahead", of_torch("AdamW", weight_decay=0.0)
    ),
}
FEW = {
    "torch.AdamW": of_torch("AdamW", weight_decay=0.0),
    "torch.SGD": of_torch("SGD", momentum=0.9, nesterov=True),
    "torch.SGD with dampening": of_torch("SGD", momentum=0.9, dampening=0.5),
    "torch.NAdam": of_torch("NAdam"),
    "torch.Adagrad": of_torch("Adagrad", initial_accumulator_value=0.1),
    "torch.Adafactor": of_torch("Adafactor"),
    "timm.madgrad": of_timm("madgrad"),
    "timm.adopt": of_timm("adopt"),
    "timm.lookahead_adamw": of_timm("lookahead_adamw"),
    "pytorch_optimizer.soap": of_collection("soap"),
    **OTHERS,
    **PACKED,
}


def needs(name):
    package = name.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FEW)
def test_an_optimizer_is_as_in_torchs_loop_and_goes_on_bit_for_bit(name, device):
    needs(name)
    try:
        assert compared(FEW[name], device=device) == (0.0, 0.0)
    finally:
        torch.use_deterministic_algorithms(False)


def table(of_all):
    """Prints and returns what was found for each."""
    found = {}
    for name, (make, matrices) in of_all.items():
        with warnings.catch_warnings(action="ignore"):
            found[name] = compared(make, matrices=matrices)
        print(f"{name:36} {found[name]}", flush=True)
    agree = sum(value == (0.0, 0.0) for value in found.values())
    print(f"{agree} of {len(found)} agree to 0.0 with torch's loop and when resumed")
    return {name: value for name, value in found.items() if value != (0.0, 0.0)}


@pytest.mark.slow
def test_torchs_optimizers():
    kinds = [k for k in vars(torch.optim).values() if isinstance(k, type)]
    names = [k.__name__ for k in kinds if issubclass(k, torch.optim.Optimizer)]
    alone = {"SparseAdam", "LBFGS"}  # take parameters
    makers = {
        name: (of_torch(name), name == "Muon")
        for name in names if name not in {*alone, "Optimizer"}
    }  # fmt: skip
    makers |= {
        name: (lambda groups, n=name: getattr(torch.optim, n)(groups[0]["params"]), False)
        for name in alone
    }
    more = {"momentum": 0.9, "dampening": 0.5}
    makers |= {"SGD with dampening": (of_torch("SGD", **more), False)}
    refused = table(makers)
    assert refused.keys() == alone
    assert "closure" in refused["LBFGS"] and "sparse" in refused["SparseAdam"]


@pytest.mark.slow
def test_timms_optimizers():
    optim = importlib.import_module("timm.optim")
    listed = optim.list_optimizers(exclude_filters=["fused*", "bnb*"])  # need CUDA
    refused = table({n: (of_timm(n), False) for n in [*listed, "lookahead_sgd"]})
    assert refused.keys() == {"adahessian"} and "gradients of gradients" in refused["adahessian"]


@pytest.mark.slow
def test_optimizers_of_other_packages():
    present = [n for n in OTHERS if importlib.util.find_spec(n.partition(".")[0])]
    assert table({name: (OTHERS[name], False) for name in present}) == {}


UNLIKE_OTHERS = {
    "adalomo": "takes a model", "adammini": "takes a model", "lomo": "takes a model",
    "demo": "needs einops", "distributedmuon": "needs several ranks",
    "lbfgs": "takes one group", "lorarite": "is for LoRA's factors",
    "spectralsphere": "takes matrices alone",
    "adahessian": "needs the graph of the gradients", "sophiah": "needs the graph of the gradients",
}  # fmt: skip
"""Optimizers of pytorch_optimizer that torch's plain loop fails with too."""
REFUSED = {
    "a2grad": "no `lr`", "alig": "closure", "bsam": "closure",
    "adashift": "keeps a deque", "conda": "keeps a GaLoreProjector",
    "scalableshampoo": "keeps a SGDGraft",
}  # fmt: skip


@pytest.mark.slow
def test_a_collection_of_optimizers():
    collection = pytest.importorskip("pytorch_optimizer")
    names = [n for n in collection.get_supported_optimizers() if n not in UNLIKE_OTHERS]
    refused = table({name: (of_collection(name), False) for name in names})
    assert refused.keys() == REFUSED.keys()
    assert all(REFUSED[name] in text for name, text in refused.items()), refused
