"""GPUs, CPUs, and TPUs through torch_tpu: eager PyTorch over torchrun, one rank a device.

Reduction, accumulation, clipping, scaling and the learning rate are the step's own.
"""

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from tpukit.errors import ConfigError, HardwareError
from tpukit.hardware.backend import (
    HALVES,
    Average,
    BackendState,
    Batch,
    DeviceUsage,
    OptimizerSettings,
    ParameterGroup,
    TorchOps,
    Trained,
)
from tpukit.hardware.collectives import (
    Collectives,
    GlooCollectives,
    init_method,
    launched_world_size,
)
from tpukit.hardware.eager.compiling import compile_forward, compiled_passes, is_recorded
from tpukit.hardware.eager.cpu_attention import cpu_attention
from tpukit.hardware.eager.deferred import CannotDeferError
from tpukit.hardware.eager.devices import CpuDevice, CudaDevice, EagerDevice, check_cuda
from tpukit.hardware.eager.distributed import DDP, FSDP, SingleProcess, split_mixed_groups
from tpukit.hardware.eager.grad_scaling import (
    LocalScaler,
    PlainUpdate,
    ScaledUpdate,
    clip_factor,
)
from tpukit.hardware.eager.recomputation import in_order, recomputed
from tpukit.hardware.first_state import make_state
from tpukit.hardware.kernels.flash_attention import fits, flash_attention
from tpukit.hardware.kernels.torch_attention import RUNNING
from tpukit.hardware.memory import (
    ReadMemory,
    give_freed_memory_back,
    keep_freed_memory,
    return_large_tensors,
)
from tpukit.hardware.modules import has_batch_norm, local, move_towards
from tpukit.hardware.optimizers import (
    MasterAdamW,
    adopt,
    choose_capturable,
    finite_gradients,
    gradients_of,
    named_optimizer,
    require_traceable,
    require_whole_matrices,
    set_rates,
)
from tpukit.hardware.options import HardwareOptions, Kind, Precision, choose_precision
from tpukit.hardware.step_programs import StepCall
from tpukit.hardware.train_step import AfterStep, step_call
from tpukit.io.process import allowed_cores, die_with_parent, output_sent_to
from tpukit.knowledge.accelerators import peak_flops


class EagerBackend(TorchOps):
    """One device: one rank of a run."""

    def __init__(
        self,
        kind: Kind,
        eager: EagerDevice,
        precision: Precision,
        collectives: Collectives,
        parallelism: SingleProcess,
        update: PlainUpdate,
        *,
        compiles: bool,
        fused: bool = False,
    ) -> None:
        """fused: whether the TPU's attention kernels can be used."""
        self.kind: Kind = kind
        self.eager = eager
        self.device = eager.device
        self.compiles_everything = eager.compiles_everything
        self.precision: Precision = precision
        self.collectives = collectives
        self.rank = collectives.rank
        self.world_size = collectives.world_size
        self.devices = collectives.world_size
        self.parallelism = parallelism
        self.update = update
        self.compiles = compiles
        self.fused = fused
        self._seed = 0
        """The last that was loaded, the same in every rank."""
        self._results: list[Tensor] = []
        """Results of the last step whose errors have not surfaced yet."""
        self._stateless: torch.optim.Optimizer | None = None
        """One whose first step makes its state: no program makes what outlives it."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def describe(self, model: nn.Module | None = None) -> Mapping[str, str | int]:
        bf16 = "native" if self.eager.native_bf16 else "emulated"
        return {
            "hardware": self.kind,
            "device": self.eager.name(),
            "devices": self.devices,
            "precision": f"bf16 ({bf16})" if self.precision == "bf16" else self.precision,
            "torch": torch.__version__,
            **self.eager.versions,
            **self._differences(model),
        }

    def _differences(self, model: nn.Module | None) -> dict[str, str]:
        if self.world_size == 1 or model is None or not has_batch_norm(model):
            return {}
        if self.parallelism.sync_batchnorm:
            return {"BatchNorm": "normalizes by the rows of all ranks"}
        return {
            "BatchNorm": "of each rank normalizes by its own rows; the running statistics are the"
            " ranks' mean (--set sync_batchnorm=true: by the rows of all ranks)"
        }

    # -- models and batches -----------------------------------------------------------------------
    def recompute(self, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        # Dynamo traces no context variable. `is_compiling` is true while a program is recorded.
        if not torch.compiler.is_dynamo_compiling() and is_recorded():
            return recomputed(function, *tensors)
        if not self.eager.recomputes:
            return super().recompute(function, *tensors)
        result: Tensor = checkpoint(function, *tensors, use_reentrant=False)
        return result

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None = None,
        *,
        causal: bool = False,
        starts: Tensor | None = None,
    ) -> Tensor:
        """See `ModelOps.attention`."""
        if self.kind == "cpu" and not self.compiles:
            return cpu_attention(query, key, value, bias, causal=causal, starts=starts)
        if not self.can_fuse(query, key, bias, starts, causal=causal):
            return super().attention(query, key, value, bias, causal=causal, starts=starts)
        from tpukit.hardware.eager.kernel_calls import kernel_call

        return flash_attention(
            query, key, value, bias, causal=causal, starts=starts, call=kernel_call
        )

    def can_fuse(
        self, query: Tensor, key: Tensor, bias: Tensor | None = None,
        starts: Tensor | None = None, *, causal: bool,
    ) -> bool:  # fmt: skip
        """Whether the TPU's kernels take these shapes here: Dynamo cannot trace their call."""
        allowed = self.fused and (is_recorded() or not torch.compiler.is_compiling())
        return allowed and fits(query, key, bias, starts, causal=causal)

    def prepare(
        self, model: nn.Module | Callable[[], nn.Module], *, train: bool = True
    ) -> nn.Module:
        made = model if isinstance(model, nn.Module) else self.parallelism.make(model)
        try:
            return self._prepared(made, train=train)
        except CannotDeferError:
            if isinstance(model, nn.Module):
                raise
            return self._prepared(model(), train=train)

    def _prepared(self, model: nn.Module, *, train: bool) -> nn.Module:
        if self.compiles:
            # Else generation would compile each of its many shapes.
            compile_forward(model, every_pass=self.compiles_everything)
        return self.parallelism.prepare(model, train=train)

    def unwrap(self, model: nn.Module) -> nn.Module:
        return self.parallelism.unwrap(model)

    def call(self, model: nn.Module, function: Callable[..., Any], *arguments: Any) -> Any:
        with compiled_passes():
            return self.parallelism.call(model, function, *arguments)

    def optimizer(
        self,
        groups: Sequence[ParameterGroup],
        settings: OptimizerSettings,
        own: torch.optim.Optimizer | None = None,
    ) -> torch.optim.Optimizer:
        optimizer = own or named_optimizer(groups, settings)
        if isinstance(optimizer, MasterAdamW) and self.precision == "fp16":
            raise ConfigError(
                "--precision fp16: gradients of weights in bf16 are not scaled.",
                "Use --precision bf16, weights in fp32, or LoRA.",
            )
        if isinstance(self.parallelism, FSDP):
            require_whole_matrices(optimizer)
            split_mixed_groups(optimizer)
        if self.compiles_everything:
            require_traceable(optimizer)
            choose_capturable(optimizer)
        adopt(optimizer, settings)
        is_recorded = self.compiles_everything and self.compiles and self.parallelism.is_recordable
        if is_recorded and not make_state(optimizer, lambda value, p: value.to(p.device)):
            self._stateless = optimizer
        return optimizer

    def batches(self, loader: Iterable[Mapping[str, Tensor]]) -> Iterator[Batch]:
        return self.eager.batches(loader)

    # -- the step ---------------------------------------------------------------------------------
    def autocast(self, precision: Precision | None = None) -> AbstractContextManager[Any]:
        dtype = HALVES.get(precision or self.precision)
        # Off in fp32: it may be on around the call of `fit`.
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None)

    def run(self, function: Callable[..., Any], batches: Sequence[Batch], *numbers: float) -> Any:
        return self._run(StepCall.of_method(function, batches, numbers))

    def train_step(
        self, trained: Trained, batches: Sequence[Batch], lr: float, average_weight: float
    ) -> bool:
        made: bool = self._run(step_call(self, trained, batches, lr, average_weight))
        self.finish()
        return made

    def _run(self, step: StepCall) -> Any:
        if not (self.compiles and self.parallelism.is_recordable):
            return step()
        if self._stateless is not None and torch.is_grad_enabled():
            optimizer, self._stateless = self._stateless, None
            if not any(optimizer.state.values()):
                return step()
        token = RUNNING.set(self)
        try:
            return self.eager.run(step, self.all_gather_objects)
        finally:
            RUNNING.reset(token)

    @contextmanager
    def micro_batch(
        self, model: nn.Module, *, first: bool, last: bool
    ) -> Iterator[Callable[[Tensor], None]]:
        if is_recorded() and not first:
            # Else the activations of all micro-batches would be held at once.
            trained = [p for p in model.parameters() if p.grad is not None]
            in_order([*trained, *(p.grad for p in trained if p.grad is not None)])
        with self.parallelism.micro_batch(model, last=last):
            yield self.backward

    def backward(self, loss: Tensor) -> None:
        # Of the ranks' mean, as DDP has it in any loop: hooks of user code see a rank's own.
        self.update.scale_loss(loss * self.world_size).backward()  # type: ignore[no-untyped-call]

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
        rates = [group["lr"] for group in optimizer.param_groups]
        set_rates(optimizer, lr)
        divisor = weight * (self.world_size * self.update.gradient_scale())
        norms = self.parallelism.norms(gradients_of(optimizer))
        raw_norm: Tensor = torch.linalg.vector_norm(norms)
        if finite is not None:
            finite.copy_(finite_gradients(optimizer, norms))
        norm = raw_norm / divisor
        self.parallelism.draw_alike(self._seed + 1)
        self.update.apply(optimizer, clip_factor(norm, clip_norm) / divisor, raw_norm)
        optimizer.zero_grad(set_to_none=True)
        if after is not None:
            after.function(self.unwrap(after.model))
            self.parallelism.share(after.model)
        update = None if average is None else average()
        if update is not None and (isinstance(update.weight, Tensor) or update.weight):
            move_towards(*update)
        if isinstance(lr, Tensor):
            # Within a program: the tensor is not there after it.
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            return norm
        updated = [p for group in optimizer.param_groups for p in group["params"]]
        self._results = [norm, *(local(p) for p in updated[-1:])]
        return norm

    def finish(self) -> None:
        self.eager.surface_errors(self._results)
        self._results = []

    # -- over ranks and to the host ---------------------------------------------------------------
    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        return self.collectives.all_reduce_sum(tensor)

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
        copies = {}
        for name, tensor in tensors.items():
            taken = tensor.detach() if to_save else self.parallelism.whole(tensor)
            if not to_save or self.is_main or isinstance(taken, DTensor):
                room = (into or {}).get(name)
                if room is not None and _form(room) == _form(taken):
                    local(room).copy_(local(taken))
                    copies[name] = room
                else:
                    copies[name] = taken.to("cpu", copy=True)
        return copies

    @torch.no_grad()
    def load(self, targets: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
        for name, target in targets.items():
            self.parallelism.fill(target, values[name])

    # -- state, memory, compilation ---------------------------------------------------------------
    def state(self) -> BackendState:
        return {"scaler": self.update.state()}

    def load_state(self, state: BackendState) -> None:
        if "seed" in state:
            self._seed = state["seed"]
            torch.manual_seed((state["seed"] + 1_000_003 * self.rank) % 2**63)
        if scaler := state.get("scaler"):
            self.update.set_state(scaler)

    def usage(self) -> DeviceUsage:
        return replace(self.eager.usage(), peak_flops=self._peak_flops())

    def _peak_flops(self) -> float | None:
        peak = None if self.kind == "cpu" else peak_flops(self.eager.name(), self.precision)
        return None if peak is None else peak * self.devices

    def memory_meter(self) -> AbstractContextManager[ReadMemory]:
        return self.eager.memory_meter()

    def compilations(self) -> int:
        return self.eager.compilations()

    def close(self) -> None:
        self.collectives.close()
        if self.kind == "cpu":
            give_freed_memory_back()


def open_eager(options: HardwareOptions, kind: Kind) -> EagerBackend:
    """The backend of this rank, which a launcher may have started.

    Raises:
        HardwareError: torch cannot use the device, or the world size is wrong.
    """
    world = launched_world_size()
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
    if options.devices is not None and options.devices != local_world:
        raise HardwareError(
            f"--devices {options.devices}: the launcher started {local_world} ranks on this host.",
            f"Use torchrun --nproc-per-node {options.devices}, or leave torchrun to tpukit.",
        )
    if world > 1:
        die_with_parent()
        share_cores(local_world)
    if kind == "gpu":
        check_cuda()
    timeout = timedelta(seconds=options.collective_timeout)
    with output_sent_to(os.devnull, 1):  # gloo logs each connection
        eager, place = _start(kind, world, timeout)
        precision = choose_precision(options.precision, kind, native_bf16=eager.native_bf16)
        parallelism = _parallelism(place, eager.device, options, precision, world)
        collectives = Collectives() if world == 1 else GlooCollectives(world, timeout)
    if options.step_mode == "traced":
        parallelism.is_recordable = False
    eager.set_arithmetic(precision, deterministic=options.deterministic)
    if options.deterministic:
        torch.use_deterministic_algorithms(True)
    if options.memory_limit is not None:
        eager.limit_memory(options.memory_limit)
    elif options.shard and world > 1:
        return_large_tensors()
    elif kind == "cpu":
        keep_freed_memory()
    scales, device = precision == "fp16", eager.device
    return EagerBackend(
        kind,
        eager,
        precision,
        collectives,
        parallelism,
        ScaledUpdate(LocalScaler(device.type), device) if scales else PlainUpdate(),
        compiles=_can_compile(kind, eager.compiles if options.compile is None else options.compile),
        fused=kind == "tpu" and world == 1 and options.kernels == "on",
    )


def _form(tensor: Tensor) -> Any:
    return type(tensor), tensor.dtype, local(tensor).shape


def _can_compile(kind: Kind, wanted: bool) -> bool:
    """Whether torch.compile is used; but for a TPU it needs the compiler of `$CXX`, else g++."""
    if kind == "tpu":
        return wanted
    compiler = os.environ.get("CXX", "g++")
    if wanted and shutil.which(compiler) is None:
        print(
            f"Warning: training is not compiled: there is no C++ compiler {compiler!r};"
            " install g++, or set CXX.",
            file=sys.stderr,
            flush=True,
        )
        return False
    return wanted


def share_cores(ranks: int) -> None:
    """Gives each rank of this host its share of the cores, unless OMP_NUM_THREADS is set."""
    if "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = str(max(1, allowed_cores() // ranks))
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def _start(
    kind: Kind, world: int, timeout: timedelta
) -> tuple[EagerDevice, Callable[[nn.Module], nn.Module]]:
    """This rank's device, and what moves a model to it; the other ranks are joined."""
    if kind == "tpu":
        from tpukit.hardware.eager.torch_tpu import start_torch_tpu

        tpu = start_torch_tpu(world)
        return tpu, tpu.place
    device = torch.device("cpu" if kind == "cpu" else "cuda")
    if world > 1:
        device = _join(kind, timeout)
    eager = CpuDevice() if kind == "cpu" else CudaDevice(device)

    def place(model: nn.Module) -> nn.Module:
        return model.to(eager.device)

    return eager, place


def _join(kind: Kind, timeout: timedelta) -> torch.device:
    """Joins the other ranks, unless a user's script has; returns this rank's device."""
    device = torch.device("cpu")
    if kind == "gpu":
        from accelerate.utils import check_cuda_p2p_ib_support

        # A launcher may show each rank its own GPU alone.
        number = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
        device = torch.device("cuda", number)
        torch.cuda.set_device(device)
        if not check_cuda_p2p_ib_support():
            # RTX 40 cards with older drivers, which hang otherwise: as `accelerate launch` does.
            os.environ.setdefault("NCCL_P2P_DISABLE", "1")
            os.environ.setdefault("NCCL_IB_DISABLE", "1")
    if not dist.is_initialized():
        backend = "gloo" if kind == "cpu" else "nccl"
        dist.init_process_group(backend, init_method=init_method(), timeout=timeout)
    return device


def _parallelism(
    place: Callable[[nn.Module], nn.Module],
    device: torch.device,
    options: HardwareOptions,
    precision: Precision,
    world: int,
) -> SingleProcess:
    if world == 1:
        return SingleProcess(place)
    if not options.shard:
        return DDP(place, sync_batchnorm=options.sync_batchnorm)
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(device.type, (world,))
    # `fully_shard` moves a model to a GPU or CPU itself.
    moves = place if device.type == "tpu" else None
    half = HALVES.get(precision)
    return FSDP(mesh, moves, half=half, sync_batchnorm=options.sync_batchnorm)
