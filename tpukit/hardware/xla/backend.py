"""TPUs through torch_xla: one process drives all devices of its host (SPMD).

The same code runs on virtual devices of the CPU: PJRT_DEVICE=CPU CPU_NUM_DEVICES=8.
"""

import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.debug.profiler as xp
import torch_xla.runtime as xr
from torch import Tensor, nn

from tpukit.errors import HardwareError
from tpukit.hardware.backend import (
    HALVES,
    Average,
    BackendState,
    Batch,
    DeviceUsage,
    OptimizerSettings,
    ParameterGroup,
    Trained,
)
from tpukit.hardware.collectives import (
    COLLECTIVE_TIMEOUT,
    Collectives,
    GlooCollectives,
    launched_world_size,
)
from tpukit.hardware.detect import emulates_kernels, is_emulated, tpu_device_files
from tpukit.hardware.first_state import make_state
from tpukit.hardware.host import Host
from tpukit.hardware.host_parts import is_in_parts
from tpukit.hardware.launch.holders import busy_named, wait_until_free
from tpukit.hardware.memory import (
    Memory,
    ReadMemory,
    SampledMemory,
    TensorMemoryLimit,
    limit_tensor_memory,
    meter_device_memory,
    meter_process_memory,
)
from tpukit.hardware.modules import has_batch_norm, move_towards, require_unpacked
from tpukit.hardware.optimizers import (
    adopt,
    finite_gradients,
    gradients_of,
    named_optimizer,
    require_traceable,
)
from tpukit.hardware.options import HardwareOptions, Kind, Precision, choose_precision
from tpukit.hardware.prefetch import prefetch
from tpukit.hardware.step_programs import StepCall
from tpukit.hardware.train_step import AfterStep, step_call
from tpukit.hardware.xla.lowerings import fallback_counts, register_lowerings
from tpukit.hardware.xla.mesh import DeviceMesh
from tpukit.hardware.xla.ops import XlaOps, running
from tpukit.hardware.xla.optimizer import (
    XlaAdafactor,
    XlaAdamW,
    choose_traced_form,
    rates_of,
    step_in_graph,
    takes_rates,
)
from tpukit.hardware.xla.tpu_memory import duty_cycle_percent, fullest_device
from tpukit.knowledge.accelerators import peak_flops, tpu_by_device_kind

if TYPE_CHECKING:
    from tpukit.hardware.xla.programs import XlaPrograms

SECONDS_BETWEEN_SAMPLES = 0.02
"""Period of the samples of a TPU's memory while it is measured; libtpu keeps no peak."""
SECONDS_IN_RUNS = 1.0
"""The same in a run, whose steps are alike: each sample takes time from the thread that trains."""


class XlaBackend(XlaOps):
    """All XLA devices of this host (and, on a pod, of the other hosts)."""

    kind: Kind = "tpu"
    compiles = True
    compiles_everything = True

    def __init__(
        self,
        mesh: DeviceMesh,
        collectives: Collectives,
        precision: Precision,
        *,
        fused: bool,
        memory_limit: TensorMemoryLimit | None = None,
    ) -> None:
        spmd_mesh = mesh.mesh if mesh.devices > 1 else None
        super().__init__(mesh.devices, fused=fused, mesh=spmd_mesh)
        self.mesh = mesh
        self.device = mesh.device
        self.precision: Precision = precision
        self.memory_limit = memory_limit
        self._sampled = SampledMemory(fullest_device, SECONDS_IN_RUNS)
        self._compiled = 0
        """Programs when the memory limit was last enforced."""
        self.collectives = collectives
        self.rank = collectives.rank
        self.world_size = collectives.world_size
        self._adds_up = False
        """Whether this step's gradients accumulate over micro-batches."""
        self._versions: dict[nn.Parameter, int] = {}
        """Writes to each accumulated gradient before the step."""
        self._unused: dict[nn.Parameter, Tensor] = {}
        """Zeros that the last step's losses added nothing to, for the next step to add to."""
        self.recorded: XlaPrograms | None = None
        """Steps that are executed without tracing; None where each is traced."""
        self._takes_rates: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """Optimizers whose rate is a tensor of the device."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def describe(self, model: nn.Module | None = None) -> Mapping[str, str | int]:
        shares = self.devices > 1 and model is not None and has_batch_norm(model)
        virtual = " (emulation on CPU: virtual devices)" if is_emulated(os.environ) else ""
        return {
            "hardware": self.kind,
            "device": f"{xr.device_type()}{virtual}",
            "devices": self.devices,
            "precision": self.precision,
            "kernels": "on" if self.fused else "off",
            "torch": torch.__version__,
            "torch_xla": torch_xla.__version__,
            **({"BatchNorm": "normalizes by the rows of all devices"} if shares else {}),
        }

    # -- models and batches -----------------------------------------------------------------------
    def prepare(
        self, model: nn.Module | Callable[[], nn.Module], *, train: bool = True
    ) -> nn.Module:
        model = model if isinstance(model, nn.Module) else model()
        require_unpacked(model, "a TPU")
        self.mesh.place(model)
        return model

    def call(self, model: nn.Module, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(model, *arguments)

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model

    def optimizer(
        self,
        groups: Sequence[ParameterGroup],
        settings: OptimizerSettings,
        own: torch.optim.Optimizer | None = None,
    ) -> torch.optim.Optimizer:
        is_complex = any(p.is_complex() for group in groups for p in group.parameters)
        if own is None and settings.name == "adamw" and not is_complex:
            return XlaAdamW(groups, settings, self.mesh.zeros_like)
        optimizer = own or named_optimizer(groups, settings)
        require_traceable(optimizer)
        choose_traced_form(optimizer)
        if optimizer.state:
            # Made in its constructor: one graph, where reading each would be many.
            torch_xla.sync()
        send, spec = self.mesh.send, self.mesh.parameter_spec
        adopt(optimizer, settings)
        if not make_state(optimizer, lambda state, _: send(state.cpu(), spec(state))):
            name = type(optimizer).__name__
            text = "makes its state in its first step, which is a program of its own."
            print(f"Note: {name} {text}", file=sys.stderr, flush=True)
        if type(optimizer) is torch.optim.Adafactor:
            return XlaAdafactor(optimizer)
        if takes_rates(optimizer, send):
            self._takes_rates.add(optimizer)
        return optimizer

    def batches(self, loader: Iterable[Mapping[str, Tensor]]) -> Iterator[Batch]:
        return prefetch(loader, self.mesh.send_batch)

    # -- the step ---------------------------------------------------------------------------------
    @contextmanager
    def autocast(self, precision: Precision | None = None) -> Iterator[None]:
        dtype = HALVES.get(precision or self.precision)
        with running(self), torch.autocast("xla", dtype=dtype, enabled=dtype is not None):
            yield
            # Casts kept for the next pass of an outer context would make that another graph.
            torch.clear_autocast_cache()

    def run(self, function: Callable[..., Any], batches: Sequence[Batch], *numbers: float) -> Any:
        return self._run(StepCall.of_method(function, batches, numbers))

    def train_step(
        self, trained: Trained, batches: Sequence[Batch], lr: float, average_weight: float
    ) -> bool:
        made: bool = self._run(step_call(self, trained, batches, lr, average_weight))
        self.finish()
        if self.memory_limit is not None and self._compiled != self.compilations():
            self.memory_limit.enforce()
            self._compiled = self.compilations()
        return made

    def _run(self, step: StepCall) -> Any:
        return step() if self.recorded is None else self.recorded.run(step)

    def record_steps(self) -> None:
        """Runs the third step of a shape, and later ones, as a program without their Python."""
        try:
            from tpukit.hardware.xla.programs import XlaPrograms
        except ImportError as error:  # another release of torch_xla
            _note(f"each step is traced: {error}")
            return
        self.recorded = XlaPrograms(str(self.mesh.device), self.mesh.send, _note)

    def _host_value(self, make: Callable[[float], Tensor], number: float) -> Tensor:
        """`make(number)` as data: a Python number would be part of the graph."""
        if self.recorded is None:
            return self.mesh.send(make(number))
        return self.recorded.host_value(make, number)

    @contextmanager
    def micro_batch(
        self, model: nn.Module, *, first: bool, last: bool
    ) -> Iterator[Callable[[Tensor], None]]:
        if first:
            self._adds_up = not last
            self._start_gradients(model)
        yield self.backward
        if self._adds_up:
            # A graph a micro-batch, always the same one: only its activations are held at a time.
            self._sync()
            if last:
                self._set_unused_aside()

    def _start_gradients(self, model: nn.Module) -> None:
        self._versions = {}
        for parameter in model.parameters():
            if not self._adds_up:
                parameter.grad = None
            elif parameter.requires_grad:
                if parameter.grad is None:
                    zeros = self._unused.get(parameter)
                    parameter.grad = self.mesh.zeros_like(parameter) if zeros is None else zeros
                self._versions[parameter] = parameter.grad._version
        if self.recorded is not None:
            self.recorded.see(p.grad for p in self._versions if p.grad is not None)

    def _set_unused_aside(self) -> None:
        """Leaves weights that no loss used without a gradient: they must not decay."""
        self._unused = {
            parameter: parameter.grad
            for parameter, version in self._versions.items()
            if parameter.grad is not None and parameter.grad._version == version
        }
        for parameter in self._unused:
            parameter.grad = None

    def backward(self, loss: Tensor) -> None:
        with running(self):  # parts of the model may be recomputed
            loss.backward()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def step(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        lr: float | Tensor,
        weight: Tensor,
        clip_norm: float | None = None,
        after: AfterStep | None = None,
        average: Callable[[], Average | None] | None = None,
        finite: Tensor | None = None,
    ) -> Tensor:
        gradients = gradients_of(optimizer)
        parts = [torch.view_as_real(g) if g.is_complex() else g for g in gradients]
        squares = torch.stack([part.float().square().sum() for part in parts])
        norm = squares.sum().sqrt() / weight
        if finite is not None:
            finite.copy_(finite_gradients(optimizer, squares))
        factor = torch.reciprocal(weight)
        if clip_norm is not None:
            factor = factor * (clip_norm / (norm + 1e-6)).clamp(max=1.0)
        self._step(optimizer, float(lr) if isinstance(lr, Tensor) else lr, gradients, factor)
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter.grad is not None and self._adds_up:
                parameter.grad.zero_()  # the next step adds to it
            else:
                parameter.grad = None
        if after is not None:
            with running(self):
                after.function(after.model)
        update = None if average is None else average()
        if update is not None:
            assert not isinstance(update.weight, Tensor)
            weight = self._host_value(torch.tensor, update.weight)
            move_towards(*update._replace(weight=weight))
        return norm

    def _step(
        self,
        optimizer: torch.optim.Optimizer,
        lr: float,
        gradients: Sequence[Tensor],
        factor: Tensor,
    ) -> None:
        if isinstance(optimizer, XlaAdamW | XlaAdafactor):
            used = optimizer.used()
            optimizer.apply(self._host_value(partial(optimizer.numbers, used), lr), factor)
            count = partial(optimizer.count, used)
            if self.recorded is None:
                count()
            else:
                self.recorded.on_host(count)
        elif optimizer in self._takes_rates:
            rates = self._host_value(partial(rates_of, optimizer), lr)
            step_in_graph(optimizer, rates, gradients, factor)
        else:
            step_in_graph(optimizer, lr, gradients, factor)
            if self.recorded is not None:
                self.recorded.refuse(f"{type(optimizer).__name__} reads its learning rate")

    def finish(self) -> None:
        if self.recorded is not None and self.recorded.has_executed:
            self.recorded.has_executed = False
        else:
            self._sync()

    def _sync(self) -> None:
        if self.recorded is not None and self.recorded.recorder is not None:
            self.recorded.recorder.end_part()
        else:
            torch_xla.sync()
        if self.memory_limit is not None:
            # Bounds the memory: the number of steps in flight on a CPU varies.
            xm.wait_device_ops()

    # -- over ranks and to the host ---------------------------------------------------------------
    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        # One program spans all hosts: what it computes from a batch is of the whole batch already.
        return tensor

    def agree(self, numbers: Sequence[float]) -> Callable[[], list[float]]:
        return self.collectives.agree(numbers)

    def all_gather_objects(self, value: Any) -> list[Any]:
        return self.collectives.all_gather_objects(value)

    def to_host(
        self,
        tensors: Mapping[str, Tensor],
        *,
        to_save: bool = False,
        into: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        host = self.mesh.to_host(tensors, in_parts=to_save)
        kept = self.is_main or not to_save
        return {name: tensor for name, tensor in host.items() if kept or is_in_parts(tensor)}

    @torch.no_grad()
    def load(self, targets: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
        for name, target in targets.items():
            self.mesh.fill(target, values[name])

    # -- state, memory, compilation ---------------------------------------------------------------
    def state(self) -> BackendState:
        return {"scaler": {}}

    def load_state(self, state: BackendState) -> None:
        if "seed" in state:
            # One program spans all devices: its one generator serves them all.
            torch.manual_seed(state["seed"])
            xm.set_rng_state(state["seed"])

    def usage(self) -> DeviceUsage:
        memory = self._memory()
        return DeviceUsage(
            memory,
            duty_cycle_percent() if self._sampled.answers else None,
            self._peak_flops(),
            keeps_freed_memory=True,
            host_sleeps=xr.device_type() == "TPU",
            fallbacks=sorted(fallback_counts()),
        )

    def _peak_flops(self) -> float | None:
        if xr.device_type() != "TPU":
            return None
        peak = peak_flops(xm.xla_device_kind(), self.precision)
        return None if peak is None else peak * self.devices

    def memory_meter(self) -> AbstractContextManager[ReadMemory]:
        if is_emulated(os.environ):
            limit = self.memory_limit
            limit_bytes = limit.limit_bytes if limit else None
            return meter_process_memory(limit_bytes, tensors_alone=limit is not None)
        self._sampled.start_anew(SECONDS_BETWEEN_SAMPLES)
        return meter_device_memory(self._memory)

    def _memory(self) -> Memory | None:
        if is_emulated(os.environ):
            return None
        try:
            info = xm.get_memory_info(self.device)
        except RuntimeError:  # torch_xla 2.9 has none under SPMD
            return self._sampled.read()
        used, limit = int(info["bytes_used"]), int(info["bytes_limit"])
        return Memory(used, int(info.get("peak_bytes_used", used)), limit or None)

    def compilations(self) -> int:
        # Not the counter UncachedCompile: it leaves out the programs that gather split tensors.
        samples = met.metric_data("CompileTime")
        return samples[0] if samples else 0

    def close(self) -> None:
        self._sampled.close()
        self.collectives.close()


def open_xla(options: HardwareOptions) -> XlaBackend:
    """The backend over all XLA devices. The environment is set already (`prepare_environment`),
    and `kernels` and `steps` are decided (`settled`).

    Raises:
        HardwareError: a launcher started several ranks, or the number of devices differs.
    """
    if launched_world_size() > 1:
        raise HardwareError(
            "--hw tpu: a launcher started several ranks, and each would train by itself.",
            "Run the command directly: one process drives all devices of its host.",
        )
    precision = choose_precision(options.precision, "tpu", native_bf16=True)
    register_lowerings()
    choose_products(precision)
    if not is_emulated(os.environ):
        host = Host()
        wait_until_free(host, tpu_device_files(host))
    with busy_named():
        mesh = DeviceMesh.open(shard=options.shard)
    if options.devices is not None and options.devices * xr.process_count() != mesh.devices:
        raise HardwareError(
            f"--devices {options.devices}: the runtime has {mesh.devices} devices.",
            "Leave --devices out to use them all.",
        )
    limit = None
    if options.memory_limit is not None:
        limit = limit_tensor_memory(options.memory_limit)
    hosts = _hosts()
    # All hosts run one program.
    fused = all(hosts.all_gather_objects(options.kernels == "on" and _has_kernels()))
    backend = XlaBackend(mesh, hosts, precision, fused=fused, memory_limit=limit)
    if options.step_mode == "recorded" and xr.process_count() == 1 and limit is None:
        backend.record_steps()
    return backend


def _note(text: str) -> None:
    print(f"Note: {text}.", file=sys.stderr, flush=True)


def choose_products(precision: Precision) -> None:
    """In fp32, products of fp32: a TPU's default rounds their factors to bf16."""
    if hasattr(torch_xla._XLAC, "_xla_set_mat_mul_precision"):  # torch_xla 2.8 has none
        kind = "highest" if precision == "fp32" else "default"
        torch_xla._XLAC._xla_set_mat_mul_precision(kind)


def _has_kernels() -> bool:
    """Whether this is a device that the Pallas kernels were written for."""
    if xr.device_type() != "TPU":
        return emulates_kernels(os.environ)
    generation = tpu_by_device_kind(xm.xla_device_kind())
    return generation is not None and generation.has_kernels


def _hosts() -> Collectives:
    """The other hosts of a pod, which run the same command. Written as the runtime documents it."""
    count = xr.process_count()
    if count == 1:
        return Collectives()
    import torch.distributed as dist
    import torch_xla.distributed.xla_backend  # noqa: F401 - registers xla://

    os.environ.setdefault("MASTER_PORT", "12355")
    dist.init_process_group("gloo", init_method="xla://", timeout=COLLECTIVE_TIMEOUT)
    return GlooCollectives(count)


@contextmanager
def profile_xla(folder: Path) -> Iterator[None]:
    """Writes the runtime's trace of what runs inside."""
    xp.start_trace(str(folder))
    try:
        yield
        xm.wait_device_ops()
    finally:
        xp.stop_trace()
