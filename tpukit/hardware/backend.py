"""The seam to the hardware: what a model, a task and the engine use of it.

No code outside `tpukit.hardware` branches on the hardware; where it would, a member is missing
here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypedDict, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpukit.hardware.memory import Memory, ReadMemory
from tpukit.hardware.options import HardwareOptions, Kind, OptimizerName, Precision

__all__ = [
    "AdamSettings",
    "Backend",
    "BackendState",
    "Batch",
    "DeviceUsage",
    "HardwareOptions",
    "Kind",
    "Memory",
    "ModelOps",
    "OptimizerSettings",
    "ParameterGroup",
    "Precision",
    "ReadMemory",
    "TorchOps",
]

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class DeviceUsage:
    """What the device reports about itself while it works."""

    memory: Memory | None
    utilization_percent: int | None


class BackendState(TypedDict, total=False):
    """What a rank saves beside tensors, as JSON holds it."""

    random: Mapping[str, str]
    """Its generators."""
    scaler: Mapping[str, float]
    """fp16's gradient scaler; empty where there is none."""


class ParameterGroup(dict[str, Any]):
    """Parameters that share optimizer settings: a group as torch's optimizers take it.

    lr_scale: the group's learning rate is the step's times this.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        weight_decay: float = 0.0,
        lr_scale: float = 1.0,
    ) -> None:
        super().__init__(params=list(parameters), weight_decay=weight_decay, lr_scale=lr_scale)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return cast("list[nn.Parameter]", self["params"])

    @property
    def weight_decay(self) -> float:
        return cast("float", self["weight_decay"])

    @property
    def lr_scale(self) -> float:
        return cast("float", self["lr_scale"])

    def options(self) -> dict[str, Any]:
        """The group as a plain dict of its own, to which others may be added."""
        return dict(self)


@dataclass(frozen=True)
class AdamSettings:
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019; plain Adam at decay 0)."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8


@dataclass(frozen=True)
class OptimizerSettings(AdamSettings):
    """What the training settings say of the optimizer; each uses those that it has."""

    name: OptimizerName = "adamw"
    lr: float = 1e-3
    """Peak learning rate."""
    momentum: float = 0.9
    """Momentum of SGD and RMSprop."""


class ModelOps(Protocol):
    """What a model may use from the hardware it is built for."""

    def recompute(self, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """`function(*tensors)` with activation checkpointing."""
        ...

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
        """softmax(query key^T / sqrt(width) + bias) value, in this hardware's leanest form.

        query (batch, heads, queries, width); key, value (batch, heads, keys, width);
        bias broadcasts to (batch, heads, queries, keys). `causal` masks keys after the query.
        starts (batch, queries): the first key that each query attends to, where a row holds several
        samples; every query must be left a key.
        """
        ...


class TorchOps:
    """`ModelOps` on any device of torch, for a model that stands by itself."""

    def recompute(self, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        return function(*tensors)

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
        if starts is not None:
            keys = torch.arange(key.shape[-2], device=query.device)
            before = keys < starts[:, None, :, None]
            shape = torch.Size((len(query), 1, query.shape[-2], len(keys)))
            nothing = torch.zeros(shape, dtype=query.dtype, device=query.device)
            bias = (nothing if bias is None else bias).masked_fill(before, float("-inf"))
        if bias is not None and causal:
            future = torch.ones(
                query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device
            ).triu(1)
            bias, causal = bias.masked_fill(future, float("-inf")), False
        if bias is not None:
            bias = bias.to(query.dtype)
        return F.scaled_dot_product_attention(query, key, value, bias, is_causal=causal)


class Backend(ModelOps, Protocol):
    """The hardware of a run. One object a rank; `tpukit.hardware.select.open_backend` builds it."""

    kind: Kind
    device: torch.device
    precision: Precision
    devices: int
    """Devices, over all ranks, that a batch is split over."""
    rank: int
    world_size: int
    """Ranks of the run: one per GPU, one per TPU host."""
    fixed_shapes: bool
    """A new shape costs a compilation, and reading a value waits for a whole graph."""
    compiles: bool
    """Training compiles a program for each shape of its batches."""
    keeps_freed_memory: bool
    """One shape of batch may leave less memory to the next: programs, or an allocator's cache."""

    @property
    def is_main(self) -> bool:
        """Whether this rank prints and saves: rank 0."""
        ...

    def describe(self) -> Mapping[str, str | int]:
        """Device names, counts, precision and versions, for the first lines of a run."""
        ...

    def remarks(self, model: nn.Module) -> list[str]:
        """What this hardware computes differently for a prepared model, a line each."""
        ...

    # -- models and batches ------------------------------------------------------------------
    def prepare(self, model: nn.Module, *, train: bool = True) -> nn.Module:
        """The model on the device: DDP or FSDP over several, compiled where that is faster.

        Weights must be loaded before. Tied parameters stay tied.
        """
        ...

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The module behind a prepared model, for its own methods (generation, say)."""
        ...

    def call(self, model: nn.Module, function: Callable[..., Any], *arguments: Any) -> Any:
        """`function(module, *arguments)`, `module` being the one behind a prepared model.

        A forward pass of the prepared model, so that gradients are averaged whichever of the
        module's methods and parts the function calls.
        """
        ...

    def parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """A prepared model's parameters by the names they had before it was prepared."""
        ...

    def optimizer(
        self,
        groups: Sequence[ParameterGroup],
        settings: OptimizerSettings,
        own: torch.optim.Optimizer | None = None,
    ) -> torch.optim.Optimizer:
        """The optimizer that `settings` names over prepared parameters, or the task's own.

        Its state exists from the start, so that `load` can fill it and every step is the same
        graph. Raises UsageError naming the class where an engine's step cannot be made of it.
        """
        ...

    def batches(self, loader: Iterable[Mapping[str, Tensor]]) -> Iterator[Batch]:
        """The loader's batches on the device; the next ones are being sent meanwhile.

        Each rank loads its own rows, which are split over its devices here.
        """
        ...

    def loader_workers(self, requested: int | None) -> int:
        """DataLoader workers of this rank: its share of those requested, else the default here."""
        ...

    # -- the step ----------------------------------------------------------------------------
    def autocast(self, precision: Precision | None = None) -> AbstractContextManager[Any]:
        """The precision of a forward pass: the run's own, or another one to compare with.

        Around several passes with the same weights it casts each weight once, where that is faster.
        """
        ...

    def uneven_passes(
        self, model: nn.Module, filler: Callable[[], object]
    ) -> AbstractContextManager[Any]:
        """Around forward passes of `model` (unwrapped) that each rank makes as many of as it needs.

        `filler` makes one pass, of any shape: sharded weights are gathered from all ranks in each.
        """
        ...

    def profile(self, folder: Path) -> AbstractContextManager[Any]:
        """Writes a profiler trace of what runs inside into `folder`."""
        ...

    def micro_batch(
        self, model: nn.Module, *, first: bool, last: bool
    ) -> AbstractContextManager[Any]:
        """Around one forward and backward pass of an optimizer step.

        Gradients accumulate until `step`; they are reduced once, after the last micro-batch.
        """
        ...

    def backward(self, loss: Tensor) -> None:
        """Backward pass of a *sum* (not mean) over this rank's rows; scaled under fp16."""
        ...

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        lr: float,
        weight: Tensor,
        clip_norm: float | None,
        after: Callable[[Tensor], None],
    ) -> None:
        """Reduce, divide by `weight`, clip, step, call `after`, sync, in this order.

        lr: the step's rate; a group's own is `lr` times its `lr_scale`.

        `weight`: the step's total weight over all ranks (0-d, on the device), so that the gradient
        is that of the weighted mean over the whole step. `after` takes the norm of that gradient
        before clipping (0-d; not finite when an fp16 step was skipped) and runs in the same graph,
        before the sync. Gradients are cleared.
        """
        ...

    def lerp(self, targets: Sequence[Tensor], sources: Sequence[Tensor], weight: float) -> None:
        """targets += weight (sources - targets), in place, pairwise: an EMA's update.

        `weight` may differ from step to step without another graph; 0 leaves the targets. Targets
        that are not floating point (counts) become the sources where it is not 0.
        """
        ...

    def finish(self) -> None:
        """Ends an evaluation or generation step: executes lazy tensors, reads nothing."""
        ...

    # -- over ranks and to the host -------------------------------------------------------
    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sum of each rank's tensor; the tensor itself where one rank holds all devices."""
        ...

    def any_rank(self, flag: bool) -> bool:
        """Whether any rank raised the flag: all ranks then take the same decision."""
        ...

    def all_gather_objects(self, value: Any) -> list[Any]:
        """Each rank's value, in the order of ranks, on every rank."""
        ...

    def barrier(self) -> None:
        """Waits for all ranks."""
        ...

    def to_host(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole (unsharded) copies on the CPU. Every rank must call it."""
        ...

    def load(self, targets: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
        """Copies whole host tensors into (possibly sharded) device tensors of the same names."""
        ...

    def exchange(self, left: Sequence[Tensor], right: Sequence[Tensor]) -> None:
        """Swaps the contents of two lists of tensors pairwise."""
        ...

    # -- state, memory, compilation ------------------------------------------------------------
    def seed(self, seed: int) -> None:
        """Seeds this rank's generators (distinct per rank)."""
        ...

    def state(self) -> BackendState:
        """This rank's generators and gradient scaler."""
        ...

    def load_state(self, state: BackendState) -> None:
        """Restores the parts that are given and not empty."""
        ...

    def usage(self) -> DeviceUsage:
        """Memory and utilization, where the device and its driver report them."""
        ...

    def peak_flops(self) -> float | None:
        """Peak operations a second of all devices in the run's precision; None where unknown."""
        ...

    def memory_meter(self) -> AbstractContextManager[ReadMemory]:
        """Measures memory beyond what is used now, on the device or, on a CPU, of this process."""
        ...

    def compilations(self) -> int:
        """Graphs that this rank has compiled so far."""
        ...

    def fallbacks(self) -> list[str]:
        """Operators (`aten::nonzero`) that left the device so far, cutting a graph."""
        ...

    def close(self) -> None:
        """Releases process groups and worker threads. Safe to call twice."""
        ...
