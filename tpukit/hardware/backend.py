"""The one seam for hardware: what a model, a task and the engine may ask of it.

No code outside `tpukit.hardware` asks which hardware it is on; where it would want to, a member is
missing here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tpukit.hardware.options import HardwareOptions, Kind, Precision

__all__ = [
    "AdamSettings",
    "Backend",
    "Batch",
    "HardwareOptions",
    "Kind",
    "Memory",
    "ModelOps",
    "ParameterGroup",
    "Precision",
]

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Memory:
    """Device memory in bytes: the fullest device where there are several."""

    used: int
    peak: int
    limit: int | None


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that share optimizer settings."""

    parameters: Sequence[nn.Parameter]
    weight_decay: float = 0.0


@dataclass(frozen=True)
class AdamSettings:
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019; plain Adam at decay 0)."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8


class ModelOps(Protocol):
    """What a model may use from the hardware it is built for."""

    def recompute(self, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """`function(*tensors)`, its activations computed again in the backward pass."""
        ...

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None = None,
        *,
        causal: bool = False,
    ) -> Tensor:
        """softmax(query key^T / sqrt(width) + bias) value, in the leanest form there is here.

        query (batch, heads, queries, width); key, value (batch, heads, keys, width);
        bias broadcasts to (batch, heads, queries, keys). `causal` masks keys after the query.
        """
        ...


class Backend(ModelOps, Protocol):
    """Where a run takes place. One object a process; built by `choice.open_backend`."""

    kind: Kind
    device: torch.device
    precision: Precision
    devices: int
    """All devices, over all processes, that a batch is split over."""
    rank: int
    world_size: int
    """Processes of the run: one per GPU, one per TPU host."""
    traced: bool
    """Steps are compiled as one graph: what is due in some steps only is written as arithmetic."""

    @property
    def is_main(self) -> bool:
        """Whether this process prints and saves."""
        ...

    def describe(self) -> Mapping[str, str | int]:
        """Device names, counts, precision and versions, for the first lines of a run."""
        ...

    # -- models and batches ------------------------------------------------------------------
    def prepare(self, model: nn.Module, *, train: bool = True) -> nn.Module:
        """The model on the device, replicated or sharded over the devices, compiled if it pays.

        Weights must be loaded before. Ties between parameters are kept.
        """
        ...

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The module behind a prepared model, for its own methods (generation, say)."""
        ...

    def parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """A prepared model's parameters by the names they had before it was prepared."""
        ...

    def buffers(self, model: nn.Module) -> dict[str, Tensor]:
        """A prepared model's persistent buffers, named likewise."""
        ...

    def optimizer(
        self, groups: Sequence[ParameterGroup], settings: AdamSettings
    ) -> torch.optim.Optimizer:
        """An AdamW over prepared parameters whose state (`step`, `exp_avg`, `exp_avg_sq`) exists
        from the start, so that it can be filled by `load` and traced in one graph."""
        ...

    def batches(self, loader: Iterable[Mapping[str, Tensor]]) -> Iterator[Batch]:
        """The loader's batches on the device, the next ones on their way already.

        Each process is given its own rows; rows are split over this process' devices here.
        """
        ...

    # -- the step ----------------------------------------------------------------------------
    def autocast(self, precision: Precision | None = None) -> AbstractContextManager[Any]:
        """The precision of a forward pass: the run's own, or another one to compare with."""
        ...

    def profile(self, folder: Path) -> AbstractContextManager[Any]:
        """Writes a trace of what runs inside, to look at, into `folder`."""
        ...

    def micro_batch(
        self, model: nn.Module, *, first: bool, last: bool
    ) -> AbstractContextManager[Any]:
        """Around one forward and backward pass of an optimizer step.

        Gradients add up until `step`; they cross processes once, with the last micro-step.
        """
        ...

    def backward(self, loss: Tensor) -> None:
        """Backward pass of a *sum* (not mean) over this process' rows; scales it under fp16."""
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
        """Reduce, divide by `weight`, clip, step, call `after`, sync; the one right order.

        `weight`: the step's total weight over all processes (0-d, on the device), so that the
        gradient is that of the weighted mean over the whole step. `after` is given the norm of
        that gradient before clipping (0-d; not finite when an fp16 step was skipped) and runs in
        the same graph, before the sync. Gradients are cleared.
        """
        ...

    def finish(self) -> None:
        """Ends an evaluation or generation step: what was traced is executed, nothing is read."""
        ...

    # -- over processes and to the host -------------------------------------------------------
    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sum of each process' tensor; the tensor itself where one process holds all devices."""
        ...

    def any_rank(self, flag: bool) -> bool:
        """Whether any process raised the flag: all processes then take the same decision."""
        ...

    def all_gather_objects(self, value: Any) -> list[Any]:
        """Every process' value, in the order of the processes, on every process."""
        ...

    def barrier(self) -> None:
        """Waits for all processes."""
        ...

    def to_host(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole (unsharded) copies on the CPU. Every process must call it."""
        ...

    def load(self, targets: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
        """Copies whole host tensors into (possibly sharded) device tensors of the same names."""
        ...

    def exchange(self, left: Sequence[Tensor], right: Sequence[Tensor]) -> None:
        """Swaps the contents of two lists of tensors pairwise."""
        ...

    # -- state, memory, compilation ------------------------------------------------------------
    def random_state(self) -> dict[str, str]:
        """This process' generators, as text that JSON can hold."""
        ...

    def set_random_state(self, state: Mapping[str, str]) -> None: ...

    def seed(self, seed: int) -> None:
        """Seeds this process' generators (distinct per process)."""
        ...

    def scaler_state(self) -> dict[str, float]:
        """The fp16 gradient scaler's state; empty where there is none."""
        ...

    def set_scaler_state(self, state: Mapping[str, float]) -> None: ...

    def memory(self) -> Memory | None:
        """Memory figures, where the device reports them."""
        ...

    def utilization_percent(self) -> int | None:
        """How busy the device is, where the driver tells."""
        ...

    def compilations(self) -> int:
        """Graphs compiled in this process so far."""
        ...

    def close(self) -> None:
        """Releases process groups and worker threads. Safe to call twice."""
        ...
