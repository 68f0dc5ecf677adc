"""A training step on virtual devices beside the CPU's, and what later steps compile.

The modules that it imports start no runtime: a process calls `on_virtual_devices` first.
"""

import math
import os
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from tpukit.errors import ConfigError
from tpukit.hardware.backend import HALVES, AdamSettings, Batch
from tpukit.hardware.dispatch_modes import with_views_on_xla
from tpukit.hardware.options import HardwareOptions
from tpukit.hardware.select import open_backend
from tpukit.train.config import TrainConfig
from tpukit.train.learner import Learner, build_learner, seed_everything
from tpukit.train.task import Datasets, PlanSettings, Task, TrainingDefaults

State = dict[str, dict[str, Tensor]]
"""Tensors on the host by kind and name."""

LEARNING_RATE = 1e-3
LATER_STEPS = 3
FLOOR = 1e-2
"""Part of the norm over all tensors from which on one counts by its own: in smaller ones rounding
errors of the others may be all there is (the gradient of a bias before BatchNorm is zero)."""
UNOPTIMIZED = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
"""XLA_FLAGS by which a program compiles three times as fast for the CPU."""
ENVIRONMENT = {
    "PJRT_DEVICE": "CPU", "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", "USE_TORCH_XLA": "0",
    "TPU_SKIP_MDS_QUERY": "1", "TF_CPP_MIN_LOG_LEVEL": "2", "TORCH_WARM_POOL": "0",
}  # fmt: skip


class SeededTask(Task):
    """A task that makes its batches itself, by a seed."""

    name = "model"
    # Adam makes a whole step of a gradient that is rounding error; a large eps keeps it small.
    defaults = TrainingDefaults(adam=AdamSettings(eps=1e-2))

    def datasets(self) -> Datasets:
        raise NotImplementedError("its batches are made from a seed")

    @abstractmethod
    def seeded_batches(self, rows: int, seed: int = 0) -> list[Batch]:
        """Host batches of this many rows, one for each shape."""

    def probe_batches(self, settings: PlanSettings) -> list[Batch]:
        return self.seeded_batches(settings.micro_rows)


@dataclass(frozen=True)
class Parity:
    """What was seen of a model's steps on virtual devices."""

    fp32: Mapping[str, float]
    """Relative difference from the CPU's of each kind of state after a step in fp32."""
    float64: Mapping[str, float] | None
    """The same in float64, where fp32 differs by more than the tolerance."""
    worst: tuple[str, str]
    """Kind and name of the tensor that differs most."""
    fallbacks: tuple[str, ...]
    """Operators that ran on the CPU."""
    compilations: int
    """Programs compiled after the second step."""

    @property
    def differences(self) -> Mapping[str, float]:
        """Those that count: in fp32 the last bit turns a ReLU on or off, and changes gradients."""
        return self.fp32 if self.float64 is None else self.float64


def on_virtual_devices(devices: int) -> None:
    """Gives this process virtual XLA devices on the CPU, before its runtime starts."""
    os.environ.update(ENVIRONMENT, CPU_NUM_DEVICES=str(devices))
    os.environ.setdefault("XLA_FLAGS", UNOPTIMIZED)
    torch.set_num_threads(1)


def compare_steps(
    task: SeededTask, rows: int, tolerance: float, *, validate: bool = False
) -> Parity:
    """A step of `rows` rows on all devices and on the CPU, from the same weights, with the same
    random numbers; then further ones on the devices, with their own.

    validate: with validations between them, as the engine does those.
    """
    xla = open_backend(HardwareOptions(hw="tpu", precision="fp32"))
    cpu = open_backend(HardwareOptions(hw="cpu", precision="fp32", compile=False))

    def stepped(backend: Any, dtype: torch.dtype = torch.float32) -> tuple[Learner, State]:
        # Built anew: a copy's closures would still call the original's modules.
        seed_everything(0)
        model = task.build_model(backend)
        model = model.double() if dtype is torch.float64 else model
        is_half = any(parameter.dtype in HALVES.values() for parameter in model.parameters())
        config = TrainConfig(ema_decay=None if is_half else 0.9)
        learner = build_learner(task, backend, model, config)
        before = _floating_buffers(learner)
        seed_everything(0)
        same = SameRandomNumbers()  # type: ignore[no-untyped-call]
        with same, torch.autograd.set_multithreading_enabled(False):
            learner.train_step(_batches(learner, rows, 0, dtype), LEARNING_RATE)
        return learner, _state(learner, before)

    on_cpu = stepped(cpu)[1]
    loss = on_cpu["loss"]["loss"]
    if not loss.isfinite():
        raise ConfigError(f"the loss is {loss} on the CPU.", "Give inputs with a finite one.")
    learner, on_xla = stepped(xla)
    fp32 = {kind: relative_error(on_xla[kind], on_cpu[kind]) for kind in on_cpu}
    float64, worst = None, _worst(on_xla, on_cpu)
    before = 0
    for seed in range(LATER_STEPS + 1):
        # Drawn on the device, random numbers make the first of these another program.
        learner.train_step(_batches(learner, rows, seed), LEARNING_RATE)
        learner.read_metrics()
        if validate and seed in (0, LATER_STEPS):
            _validate(learner, rows)
        before = before or xla.compilations()
    fallbacks, later = tuple(xla.usage().fallbacks), xla.compilations() - before
    del learner  # and its state on all devices
    if max(fp32.values()) > tolerance:
        with suppress(RuntimeError):  # a model that casts by itself
            exact, found = stepped(cpu, torch.float64)[1], stepped(xla, torch.float64)[1]
            float64 = {kind: relative_error(found[kind], exact[kind]) for kind in exact}
            worst = _worst(found, exact)
    return Parity(fp32, float64, worst, fallbacks, later)


def _batches(
    learner: Learner, rows: int, seed: int, dtype: torch.dtype = torch.float32
) -> list[Batch]:
    """The batch of one step, on the learner's devices."""
    task = learner.task
    assert isinstance(task, SeededTask)
    host = task.seeded_batches(rows, seed)[:1]
    if dtype is torch.float64:
        host = [{n: v.double() if v.is_floating_point() else v for n, v in host[0].items()}]
    return list(learner.backend.batches(host))


def _validate(learner: Learner, rows: int) -> None:
    assert learner.ema is not None
    learner.model.eval()
    with learner.ema.in_place_of_weights():
        learner.sums.add(_batches(learner, rows, 100)[0])
    learner.model.train()
    learner.sums.read()


def _floating_buffers(learner: Learner) -> dict[str, Tensor]:
    buffers = learner.backend.unwrap(learner.model).named_buffers()
    return learner.backend.to_host({n: b for n, b in buffers if b.is_floating_point()})


def _state(learner: Learner, before: Mapping[str, Tensor]) -> State:
    """The loss, and every floating tensor that a step changes, on the host; of buffers the change
    since `before`: beside a mask of -1e9 no other buffer would count."""
    backend, model = learner.backend, learner.backend.unwrap(learner.model)
    loss = torch.tensor(learner.read_metrics().means["loss"])
    parameters = dict(model.named_parameters())
    # The first moment of Adam's first step is the gradient, up to a factor.
    moments = {n: learner.optimizer.state.get(p, {}) for n, p in parameters.items()}
    gradients = {n: held["exp_avg"] for n, held in moments.items() if "exp_avg" in held}
    return {
        "loss": {"loss": loss},
        "gradients": backend.to_host(gradients),
        "parameters": backend.to_host(parameters),
        "ema": backend.to_host(learner.ema.weights) if learner.ema else {},
        "buffers": {n: b - before[n] for n, b in _floating_buffers(learner).items()},
    }


def relative_error(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    """The largest of the tensors' relative differences."""
    return max(_errors(left, right).values(), default=0.0)


def _errors(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> dict[str, float]:
    """|left - right| / |right| of each tensor, in the 2-norm, where |right| is at least `FLOOR`
    times the norm over all; infinities and NaN may be equal."""
    off, size = {}, {}
    for name, value in right.items():
        found, wanted = left[name].double(), value.double()
        equal = (found == wanted) | (found.isnan() & wanted.isnan())
        difference = (found - wanted).masked_fill(equal, 0.0).nan_to_num(nan=torch.inf)
        off[name] = float(difference.norm())
        size[name] = float(wanted.nan_to_num(0.0, 0.0, 0.0).norm())
    floor = FLOOR * math.hypot(*size.values())
    return {name: off[name] / (max(own, floor) or 1.0) for name, own in size.items()}


def _worst(left: State, right: State) -> tuple[str, str]:
    """Kind and name of the gradient or buffer that differs most."""
    errors = {
        (kind, name): error
        for kind in ("gradients", "buffers")
        for name, error in _errors(left[kind], right[kind]).items()
    }
    return max(errors, key=errors.__getitem__)


class SameRandomNumbers(TorchDispatchMode):
    """Inside, the CPU's generator draws the random numbers of every device, drop-out's too."""

    @with_views_on_xla
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given, name = dict(kwargs or {}), func.overloadpacket.__name__
        draws = torch.Tag.nondeterministic_seeded in func.tags or name.strip("_") == "random"
        if not draws or name.startswith("_"):  # fused attention, without drop-out
            return func(*args, **given)
        values, numbers = tree_map(_on_host, (args, given))
        drawn = func(*values, **numbers)
        if name.endswith("_"):
            return args[0].copy_(drawn)
        tensors = [leaf for leaf in tree_leaves((args, given)) if isinstance(leaf, Tensor)]
        device = tensors[0].device if tensors else given.get("device")
        return tree_map_only(Tensor, lambda made: made.to(device or "cpu"), drawn)


def _on_host(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.to("cpu").contiguous()  # the generator fills memory in its order
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf
