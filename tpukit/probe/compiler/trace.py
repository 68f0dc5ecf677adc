"""Traces a training step with torch_xla's CPU device: no accelerator, no storage, no execution.

Every tensor is a placeholder that has a shape and nothing behind it. The step is the engine's own
and runs on the real XLA backend, up to the moment where that would execute: what is pending then
is the program that a TPU would be given.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch import Tensor, nn
from torch_xla.core.xla_builder import create_placeholder_tensor

from tpukit.hardware.backend import AdamSettings, ParameterGroup
from tpukit.hardware.collectives import SingleRank
from tpukit.hardware.options import Precision
from tpukit.hardware.xla.backend import XlaBackend
from tpukit.hardware.xla.flash_attention import TILES
from tpukit.hardware.xla.mesh import DeviceMesh, Spec
from tpukit.probe.compiler.compile import Program
from tpukit.probe.compiler.source_map import Place
from tpukit.train.config import TrainConfig
from tpukit.train.step import Learner, build_learner
from tpukit.train.task import PlanSettings, Task

HIDDEN_EXECUTION = "Unexpected execution happens inside the compiled function"


class LeftDeviceError(Exception):
    """An operation would have left the device in the middle of the step."""

    def __init__(self, place: Place | None, source: str) -> None:
        where = f"{place.path}:{place.line}" if place else "an unknown place"
        super().__init__(f"{where}: `{source}`" if source else where)


@dataclass
class Named:
    """What a placeholder stands for."""

    kind: str
    sharding: str | None
    bytes_per_device: int


@dataclass
class Ledger:
    """Every placeholder by its handle, and the tensors that outlive a step."""

    devices: int
    names: dict[int, Named] = field(default_factory=dict)
    kind: str = "other"
    """What is being sent just now."""

    def placeholder(self, like: Tensor, spec: Spec | None = None) -> Tensor:
        """A device tensor of this shape and type with nothing behind it."""
        tensor: Tensor = create_placeholder_tensor(tuple(like.shape), like.dtype)
        self.enter(tensor, spec)
        return tensor

    def enter(self, tensor: Tensor, spec: Spec | None) -> None:
        """Books a placeholder under its present kind and layout."""
        split = self.devices if spec and any(spec) else 1
        size = tensor.numel() * tensor.element_size() // split
        self.names[handles_of([tensor])[0]] = Named(self.kind, _layout(spec, self.devices), size)

    @contextmanager
    def sending(self, kind: str) -> Iterator[None]:
        """What is sent inside is of this kind."""
        before, self.kind = self.kind, kind
        try:
            yield
        finally:
            self.kind = before


class TracingMesh(DeviceMesh):
    """A mesh that sends nothing: what arrives is a placeholder."""

    def __init__(self, real: DeviceMesh, ledger: Ledger) -> None:
        super().__init__(real.mesh, real.device, shard=real.shard)
        self.ledger = ledger

    def send(self, value: Tensor, spec: Spec | None = None) -> Tensor:
        return self.ledger.placeholder(value, spec)

    def zeros_like(self, tensor: Tensor) -> Tensor:
        return self.ledger.placeholder(tensor, self.parameter_spec(tensor))


class TracingBackend(XlaBackend):
    """The XLA backend as it is on a TPU, but its programs are kept instead of executed."""

    def __init__(self, mesh: TracingMesh, precision: Precision, *, fused: bool) -> None:
        super().__init__(mesh, SingleRank(), precision, fused=fused)
        self.ledger = mesh.ledger
        self.programs: list[Program] = []
        self.kernel_shares: list[float] = []
        """For each fused attention so far, the part of its score blocks that are computed."""
        self.persistent: Callable[[], Sequence[Tensor]] = list
        self._before: list[int] = []

    def prepare(self, model: nn.Module, *, train: bool = True) -> nn.Module:
        with self.ledger.sending("parameters"):
            return super().prepare(model, train=train)

    def optimizer(
        self, groups: Sequence[ParameterGroup], settings: AdamSettings
    ) -> torch.optim.Optimizer:
        with self.ledger.sending("optimizer"):
            return super().optimizer(groups, settings)

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None = None,
        *,
        causal: bool = False,
    ) -> Tensor:
        if self._can_fuse(query, key, bias, causal=causal):
            self.kernel_shares.append(_share_of_tiles(query.shape[-2], causal=causal))
        return super().attention(query, key, value, bias, causal=causal)

    def watch(self, persistent: Callable[[], Sequence[Tensor]]) -> None:
        """From now on: what these tensors hold at each sync is a program's outcome."""
        self.persistent = persistent
        self._before = handles_of(persistent())

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        # Earlier micro-steps' parts were executed with their own programs.
        return self.ledger.placeholder(tensor) if self._adds_up else tensor

    def _start_gradients(self, model: nn.Module) -> None:
        with self.ledger.sending("gradients"):
            super()._start_gradients(model)
        self._before = handles_of(self.persistent())

    def _sync(self) -> None:
        kept = list(self.persistent())
        changed = torch_xla._XLAC._check_tensor_need_materialization(kept)
        pairs = zip(kept, self._before, changed, strict=True)
        updated = [(tensor, handle) for tensor, handle, is_new in pairs if is_new]
        self.programs.append(self._program([t for t, _ in updated], [h for _, h in updated]))
        for tensor, handle in updated:
            fresh = create_placeholder_tensor(tuple(tensor.shape), tensor.dtype)
            self.ledger.names[handles_of([fresh])[0]] = self.ledger.names[handle]
            tensor.data = fresh
        self._before = handles_of(kept)

    def _program(self, outputs: list[Tensor], replaced: list[int]) -> Program:
        _, arguments = torch_xla._XLAC._get_tensors_xla_device_data_node(outputs)
        handles = handles_of(arguments)
        names = [self.ledger.names.get(handle) for handle in handles]
        places = {handle: index for index, handle in enumerate(handles)}
        resident = {handle: self.ledger.names[handle] for handle in self._before}
        return Program(
            bytecode=xm.get_stablehlo_bytecode(outputs),
            aliases={places[h]: output for output, h in enumerate(replaced) if h in places},
            argument_shardings=tuple(name.sharding if name else None for name in names),
            outputs=len(outputs),
            kernel_share=sum(self.kernel_shares) / max(1, len(self.kernel_shares)),
            resident=_sizes(resident.values()),
            resident_elsewhere=sum(
                name.bytes_per_device for handle, name in resident.items() if handle not in places
            ),
        )


@dataclass(frozen=True)
class TracedStep:
    """The programs of one optimizer step, in their order, and of an evaluation batch."""

    training: tuple[Program, ...]
    evaluation: Program
    parameters: int
    """Weights of the model."""


def open_tracing(precision: Precision, *, shard: bool, fused: bool) -> TracingBackend:
    """A backend on as many virtual devices as CPU_NUM_DEVICES says."""
    real = DeviceMesh.open(shard=shard)
    return TracingBackend(TracingMesh(real, Ledger(real.devices)), precision, fused=fused)


def trace_step(
    task: Task, config: TrainConfig, backend: TracingBackend, rows: int, accumulate: int
) -> TracedStep:
    """What a TPU would be given for one step of `rows` rows a device, and for an evaluation.

    Raises:
        LeftDeviceError: an operation wanted a value, or ran on the CPU, in the middle of it.
    """
    ledger = backend.ledger
    torch.manual_seed(0)
    with without_storage():
        model = task.build_model(backend)
    learner = _learner(task, config, backend, model)
    with ledger.sending("batch"):
        micro_rows = rows * backend.devices
        settings = PlanSettings(micro_rows * accumulate, micro_rows, backend.devices, 0)
        host = task.probe_batches(settings)[0]
        batches = [backend.mesh.send_batch(host) for _ in range(accumulate)]
    with no_execution():
        learner.train_step(batches, lr=config.lr)
        training = _one_of_each(backend.programs)
        backend.programs.clear()
        for parameter in learner.model.parameters():
            parameter.grad = None
        backend.watch(lambda: _state(learner))
        learner.model.eval()
        learner.evaluation_step(batches[0])
    count = sum(p.numel() for p in backend.parameters(learner.model).values())
    return TracedStep(training, backend.programs[-1], count)


def _one_of_each(programs: Sequence[Program]) -> tuple[Program, ...]:
    """Micro-steps are all the same program: the first and the update stand for all."""
    if len(programs) <= 2:
        return tuple(programs)
    return (programs[0], programs[-1])


def _learner(task: Task, config: TrainConfig, backend: TracingBackend, model: nn.Module) -> Learner:
    """The engine's learner, all it holds replaced by placeholders."""
    ledger, mesh = backend.ledger, backend.mesh
    learner = build_learner(task, backend, model, config)
    if learner.average:
        with ledger.sending("ema"):
            averages = learner.average.averages
            averages.update({name: mesh.zeros_like(value) for name, value in averages.items()})
    for name, value in vars(learner).items():
        if isinstance(value, Tensor):
            setattr(learner, name, ledger.placeholder(value))
    backend.programs.clear()
    backend.watch(lambda: _state(learner))
    return learner


def _state(learner: Learner) -> list[Tensor]:
    """Every device tensor that outlives a step."""
    parameters = list(learner.model.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    optimizer = [
        value
        for state in learner.optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor) and value.device.type == "xla"
    ]
    averages = list(learner.average.averages.values()) if learner.average else []
    buffers = [b for b in learner.model.buffers() if b.device.type == "xla"]
    figures = [value for value in vars(learner).values() if isinstance(value, Tensor)]
    kept = [*parameters, *buffers, *optimizer, *averages, *figures]
    return [*kept, *(gradients if learner.backend._adds_up else [])]  # type: ignore[attr-defined]


def handles_of(tensors: Sequence[Tensor]) -> list[int]:
    """The device data behind tensors, as numbers."""
    handles: list[int] = torch_xla._XLAC._get_tensors_handle(list(tensors))
    return handles


@contextmanager
def no_execution() -> Iterator[None]:
    """Turns a hidden execution (`.item()`, an operation XLA does not have) into an error."""
    torch_xla._XLAC._set_allow_execution(False)
    # The backward pass must run in this thread, or its errors have no Python stack.
    with torch.autograd.set_multithreading_enabled(False):
        try:
            yield
        except RuntimeError as error:
            if HIDDEN_EXECUTION not in str(error):
                raise
            raise LeftDeviceError(*_origin(error)) from error
        finally:
            torch_xla._XLAC._set_allow_execution(True)


def _origin(error: BaseException) -> tuple[Place | None, str]:
    """The model's innermost line in an error's traceback, and what stands there."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if Place(f.filename, f.lineno or 0).is_the_models]
    frame = (own or list(frames))[-1]
    return Place(frame.filename, frame.lineno or 0), frame.line or ""


@contextmanager
def without_storage() -> Iterator[None]:
    """Parameters that modules register inside have a shape and no storage; buffers are real.

    Ties between parameters stay: a parameter that has no storage already is left as it is.
    """
    register = nn.Module.register_parameter

    def register_shape(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta":
            parameter = nn.Parameter(parameter.data.to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_shape  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _layout(spec: Spec | None, devices: int) -> str | None:
    """A spec as mhlo.sharding writes it; None: every device has it all."""
    if devices == 1 or spec is None or not any(spec):
        return None
    shape = ",".join(str(devices) if axis else "1" for axis in spec)
    return f"{{devices=[{shape}]<=[{devices}]}}"


def _share_of_tiles(queries: int, *, causal: bool) -> float:
    """A causal kernel leaves out the tiles above the diagonal."""
    tiles = queries // next(size for size in TILES if queries % size == 0)
    return (tiles + 1) / (2 * tiles) if causal else 1.0


def _sizes(named: Any) -> Mapping[str, int]:
    """Bytes of a device by kind."""
    sizes: dict[str, int] = {}
    for name in named:
        sizes[name.kind] = sizes.get(name.kind, 0) + name.bytes_per_device
    return sizes
