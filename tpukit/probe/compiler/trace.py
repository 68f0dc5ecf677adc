"""Traces a training step with torch_xla's CPU device: no accelerator, no storage, no execution.

Every device tensor is a placeholder. The engine's own step runs on the real XLA backend, whose lazy
tensors record a graph; where the backend would execute the graph, it is kept as the program that a
TPU would be given.
"""

import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch import Tensor, nn
from torch_xla.core.xla_builder import create_placeholder_tensor

from tpukit.hardware.backend import Batch
from tpukit.hardware.collectives import Collectives
from tpukit.hardware.kernels.flash_attention import share_of_tiles
from tpukit.hardware.options import Precision
from tpukit.hardware.xla.backend import XlaBackend, choose_products
from tpukit.hardware.xla.lowerings import fallback_counts, register_lowerings
from tpukit.hardware.xla.mesh import DeviceMesh, Spec, is_on_xla
from tpukit.probe.compiler.compile import Program, TracedStep, program_text
from tpukit.probe.compiler.source_map import (
    FORWARD_STACK,
    HIDDEN_EXECUTION,
    forward_frames,
    leaving_error,
    located_operations,
)
from tpukit.probe.unfilled_model import unfilled_model
from tpukit.train.config import TrainConfig
from tpukit.train.learner import Learner, build_learner
from tpukit.train.loader import example_batches
from tpukit.train.task import PlanSettings, Task


# -- device tensors that have a shape and no storage ----------------------------------------------
@dataclass
class Placeholder:
    """The tensor that a placeholder without storage stands for."""

    kind: str
    """parameters, optimizer, ema, gradients, batch, other."""
    sharding: str | None
    """Its mhlo.sharding; None: replicated."""
    bytes_per_device: int


@dataclass
class Placeholders:
    """Creates device tensors without storage, and knows each one by its handle."""

    devices: int
    by_handle: dict[int, Placeholder] = field(default_factory=dict)
    kind: str = "other"
    """The kind of those created now."""

    def like(self, tensor: Tensor, spec: Spec | None = None) -> Tensor:
        """A placeholder of this shape and dtype, sharded by `spec`."""
        split = self.devices if spec and any(spec) else 1
        size = tensor.numel() * tensor.element_size() // split
        return self._create(tensor, Placeholder(self.kind, _sharding(spec, self.devices), size))

    def replace(self, tensor: Tensor, handle: int) -> None:
        """Gives a tensor that was computed a new placeholder of the kind of its former handle."""
        tensor.data = self._create(tensor, self.by_handle[handle])

    def _create(self, like: Tensor, placeholder: Placeholder) -> Tensor:
        tensor: Tensor = create_placeholder_tensor(tuple(like.shape), like.dtype)
        self.by_handle[handles_of([tensor])[0]] = placeholder
        return tensor

    def of_kind(self, kind: str) -> AbstractContextManager[Any]:
        """Placeholders created inside are of this kind."""
        return mock.patch.object(self, "kind", kind)


class TracingMesh(DeviceMesh):
    """A mesh whose transfers create placeholders."""

    def __init__(self, real: DeviceMesh, placeholders: Placeholders) -> None:
        super().__init__(real.mesh, real.device, shard=real.shard)
        self.placeholders = placeholders

    def send(self, value: Tensor, spec: Spec | None = None) -> Tensor:
        return self.placeholders.like(value, spec)

    def zeros_like(self, tensor: Tensor) -> Tensor:
        return self.placeholders.like(tensor, self.parameter_spec(tensor))


def handles_of(tensors: Sequence[Tensor]) -> list[int]:
    """The device data behind tensors, as numbers."""
    handles: list[int] = torch_xla._XLAC._get_tensors_handle(list(tensors))
    return handles


def _form(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _sharding(spec: Spec | None, devices: int) -> str | None:
    """A spec as mhlo.sharding; None: replicated."""
    if devices == 1 or spec is None or not any(spec):
        return None
    shape = ",".join(str(devices) if axis else "1" for axis in spec)
    return f"{{devices=[{shape}]<=[{devices}]}}"


# -- the step --------------------------------------------------------------------------------------
class TracingBackend(XlaBackend):
    """The XLA backend as it is on a TPU, but its graphs are kept as programs, not executed."""

    def __init__(self, mesh: TracingMesh, precision: Precision, *, fused: bool) -> None:
        super().__init__(mesh, Collectives(), precision, fused=fused)
        self.placeholders = mesh.placeholders
        self.programs: list[Program] = []
        self.kernel_shares: list[float] = []
        """Part of the score tiles that each fused attention so far computes: the compiler does not
        see into one."""
        self.persistent: Callable[[], Sequence[Tensor]] = list
        self._before: list[int] = []

    def prepare(
        self, model: nn.Module | Callable[[], nn.Module], *, train: bool = True
    ) -> nn.Module:
        with self.placeholders.of_kind("parameters"):
            return super().prepare(model, train=train)

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None, *,
        causal: bool = False, starts: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        if self.can_fuse(query, key, bias, starts, causal=causal):
            self.kernel_shares.append(share_of_tiles(query, causal=causal))
        return super().attention(query, key, value, bias, causal=causal, starts=starts)

    def optimizer(self, *given: Any) -> torch.optim.Optimizer:
        with self.placeholders.of_kind("optimizer"):
            return super().optimizer(*given)

    def watch(self, persistent: Callable[[], Sequence[Tensor]]) -> None:
        """Makes these tensors a program's outputs where the next syncs find them changed."""
        self.persistent = persistent
        self._before = handles_of(persistent())

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        # Earlier micro-batches' sums were computed by their own programs.
        return self.placeholders.like(tensor) if self._adds_up else tensor

    def _start_gradients(self, model: nn.Module) -> None:
        with self.placeholders.of_kind("gradients"):
            super()._start_gradients(model)
        self._before = handles_of(self.persistent())

    def _sync(self) -> None:
        kept = list(self.persistent())
        changed = torch_xla._XLAC._check_tensor_need_materialization(kept)
        pairs = zip(kept, self._before, changed, strict=True)
        updated = [(tensor, handle) for tensor, handle, is_new in pairs if is_new]
        self.programs.append(self._program([t for t, _ in updated], [h for _, h in updated]))
        for tensor, handle in updated:
            self.placeholders.replace(tensor, handle)
        self._before = handles_of(kept)

    def _program(self, outputs: list[Tensor], replaced: list[int]) -> Program:
        """The pending graph of `outputs`, which take the place of the handles `replaced`."""
        _, arguments = torch_xla._XLAC._get_tensors_xla_device_data_node(outputs)
        known, handles = self.placeholders.by_handle, handles_of(arguments)
        index_of = {handle: index for index, handle in enumerate(handles)}
        # A handle is an address: that of what is overwritten unread may be another argument's now.
        aliases = {
            index_of[handle]: output
            for output, handle in enumerate(replaced)
            if handle in index_of and _form(arguments[index_of[handle]]) == _form(outputs[output])
        }
        resident: Counter[str] = Counter()
        elsewhere = 0
        # A buffer that the model made itself in a step before was sent by no one.
        for handle in (h for h in self._before if h in known):
            resident[known[handle].kind] += known[handle].bytes_per_device
            elsewhere += 0 if handle in index_of else known[handle].bytes_per_device
        return Program(
            bytecode=xm.get_stablehlo_bytecode(outputs),
            aliases=aliases,
            argument_shardings=tuple(
                known[handle].sharding if handle in known else None for handle in handles
            ),
            outputs=len(outputs),
            kernel_share=sum(self.kernel_shares) / max(1, len(self.kernel_shares)),
            resident=dict(resident),
            resident_elsewhere=elsewhere,
        )


def open_tracing(precision: Precision, *, shard: bool, fused: bool) -> TracingBackend:
    """A backend on CPU_NUM_DEVICES virtual devices, for any topology of as many."""
    register_lowerings()
    choose_products(precision)
    real = DeviceMesh.open(shard=shard)
    mesh = TracingMesh(real, Placeholders(real.devices))
    return TracingBackend(mesh, precision, fused=fused)


def trace_step(
    task: Task, config: TrainConfig, backend: TracingBackend, rows: int, accumulate: int
) -> TracedStep:
    """The programs of one step of micro-batches of `rows` samples a device, and of an evaluation.

    Raises:
        JobError: an operation reads a value, or runs on the CPU, in the middle of the step.
    """
    learner, batches = _ready(task, config, backend, rows, accumulate)
    with no_execution():
        learner.train_step(batches, lr=config.lr)
        # All micro-batches have the same program; with accumulation, the update has its own.
        training = (*backend.programs[:1], *backend.programs[1:][-1:])
        backend.programs.clear()
        for parameter in learner.model.parameters():
            parameter.grad = None
        backend.watch(lambda: _state(learner))
        learner.model.eval()
        learner.sums.add(batches[0])
    count = sum(p.numel() for p in backend.unwrap(learner.model).parameters())
    return TracedStep(training, backend.programs[-1], count)


def first_change(task: Task, config: TrainConfig, backend: TracingBackend, rows: int) -> str | None:
    """Where the program of a third step differs from the second's: an operation with its line.

    None: the same, or only where no line is known.
    """
    learner, batches = _ready(task, config, backend, rows, accumulate=1)
    with no_execution():
        for _ in range(3):
            learner.train_step(batches, lr=config.lr)
    texts = (program_text(program, places=True) for program in backend.programs[1:3])
    pairs = zip(*map(located_operations, texts), strict=False)
    return next((place for (one, _), (other, place) in pairs if one != other and place), None)


def _ready(
    task: Task, config: TrainConfig, backend: TracingBackend, rows: int, accumulate: int
) -> tuple[Learner, list[Batch]]:
    """The learner before its first step, and the micro-batches of one step."""
    torch.manual_seed(0)
    learner = _learner(task, config, backend, unfilled_model(task, backend))
    with backend.placeholders.of_kind("batch"):
        micro_rows = rows * backend.devices
        settings = PlanSettings(
            micro_rows * accumulate, micro_rows, backend.devices, seed=0, compiles=True
        )
        host = example_batches(task, settings)[0]
        batches = [backend.mesh.send_batch(host) for _ in range(accumulate)]
    return learner, batches


def _learner(task: Task, config: TrainConfig, backend: TracingBackend, model: nn.Module) -> Learner:
    """The engine's learner, all its tensors replaced by placeholders."""
    learner = build_learner(task, backend, model, config)
    if learner.ema:
        with backend.placeholders.of_kind("ema"):
            averages = learner.ema.weights
            averages |= {n: backend.mesh.zeros_like(averages[n]) for n in learner.ema.parameters}
            averages |= {n: backend.placeholders.like(b) for n, b in learner.ema.buffers.items()}
    for part in (learner.sums, learner):
        for name, value in vars(part).items():
            if isinstance(value, Tensor):
                setattr(part, name, backend.placeholders.like(value))
    backend.programs.clear()
    backend.watch(lambda: _state(learner))
    return learner


def _state(learner: Learner) -> list[Tensor]:
    """Every device tensor that outlives a step."""
    model, parameters = learner.model, list(learner.model.parameters())
    kept = [
        *parameters,
        *model.buffers(),
        *(value for state in learner.optimizer.state.values() for value in state.values()),
        *(learner.ema.weights.values() if learner.ema else ()),
        *(value for part in (learner.sums, learner) for value in vars(part).values()),
        *(p.grad for p in parameters if learner.backend._adds_up),  # type: ignore[attr-defined]
    ]
    return [value for value in kept if isinstance(value, Tensor) and is_on_xla(value)]


@contextmanager
def no_execution() -> Iterator[None]:
    """Turns a hidden execution (`.item()`, an operator XLA does not have) into an error."""
    before = fallback_counts()
    torch_xla._XLAC._set_allow_execution(False)
    with (
        warnings.catch_warnings(record=True) as recorded,
        # The backward pass must run in this thread, or its errors have no Python stack. Anomaly
        # mode keeps each gradient's forward stack: its own has no line of the model.
        torch.autograd.set_multithreading_enabled(False),
        torch.autograd.set_detect_anomaly(True, check_nan=False),
    ):
        warnings.filterwarnings("always", message=FORWARD_STACK)
        try:
            yield
        except RuntimeError as error:
            if not any(text in str(error) for text in HIDDEN_EXECUTION):
                raise
            frames = [*traceback.extract_tb(error.__traceback__), *forward_frames(recorded)]
            left = [name for name, count in fallback_counts().items() if count != before.get(name)]
            raise leaving_error(left, frames) from error
        finally:
            torch_xla._XLAC._set_allow_execution(True)
    for each in recorded:
        warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
