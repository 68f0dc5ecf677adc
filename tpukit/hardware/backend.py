"""The seam to the hardware: what a model, a task and the engine use of it.

No code outside `tpukit.hardware` branches on the hardware; where it would, a member is missing
here.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypedDict, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpukit.hardware.memory import Memory, ReadMemory
from tpukit.hardware.options import OptimizerName, Precision

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class DeviceUsage:
    """What the device reports about itself while it works."""

    memory: Memory | None
    utilization_percent: int | None = None
    peak_flops: float | None = None
    """Peak operations a second of all devices in the run's precision; None where unknown."""
    keeps_freed_memory: bool = False
    """One shape of batch may leave less memory to the next: programs, or an allocator's cache."""
    host_sleeps: bool = False
    """Whether the thread that trains sleeps while it waits for the devices."""
    fallbacks: Sequence[str] = ()
    """Operators (`aten::nonzero`) that left the device so far, cutting a graph."""


HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""What linear layers compute in under autocast, by precision."""


class BackendState(TypedDict, total=False):
    """State that a rank saves beside tensors, as JSON."""

    seed: int
    """Seed to start this rank's generators of torch with, distinct per rank; never saved."""
    scaler: Mapping[str, float]
    """State of fp16's gradient scaler; empty without one."""


class ParameterGroup(dict[str, Any]):
    """Parameters that share optimizer settings: a group as torch's optimizers take it.

    lr_scale: the group's learning rate is the step's times this.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], weight_decay: float = 0.0, lr_scale: float = 1.0
    ) -> None:
        once = list(dict.fromkeys(parameters))  # tied weights of two modules
        super().__init__(params=once, weight_decay=weight_decay, lr_scale=lr_scale)

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
    """Settings of every optimizer; each uses those that it has."""

    name: OptimizerName = "adamw"
    lr: float = 1e-3
    """Peak learning rate."""
    momentum: float = 0.9
    """Momentum of SGD and RMSprop."""


class Average(NamedTuple):
    """An EMA's update: averages += weight (sources - averages), in place, pairwise.

    Copies become the originals where `weight` is not 0.
    """

    averages: Sequence[Tensor]
    sources: Sequence[Tensor]
    weight: float | Tensor
    """May differ from step to step without another graph; 0 leaves the averages."""
    copies: Sequence[Tensor] = ()
    originals: Sequence[Tensor] = ()


class StepSums:
    """What the micro-batches of a step add up to, on the device; zeros between steps."""

    def __init__(self, entries: int, device: torch.device) -> None:
        self.totals = torch.zeros(entries, device=device)
        self.unit = torch.zeros((), device=device)
        """The weight of the step's first micro-batch, which its backward passes divide by: what
        user code sees in them (hooks, autograd functions) is the gradient of a mean."""

    def clear(self) -> None:
        self.totals.zero_()
        self.unit.zero_()


class StepDroppedError(Exception):
    """Raised by `Trained.forward`: the step is to be left, and what its passes moved is undone."""


class Trained(Protocol):
    """What `train_step` trains, and what a step computes: the engine's `Learner`.

    A program of a step is kept for this object, until what its `task`, `model` and `optimizer`
    hold has changed. Beside these and tensors of the device its methods depend on nothing that
    changes.
    """

    model: nn.Module
    """As `prepare` returned it."""
    optimizer: torch.optim.Optimizer
    clip_norm: float | None
    step_sums: StepSums
    finite: Tensor
    """On the device, an entry for each parameter in the order of the optimizer's groups: becomes 0
    where a gradient was not finite, else 1."""

    @property
    def after_step(self) -> Callable[[nn.Module], object] | None:
        """Called with the module behind `model` once a step has moved the weights, by every rank;
        the ranks then have the same persistent buffers again."""

    def forward(self, batch: Batch) -> Tensor:
        """(entries of `step_sums`,): sums over this rank's rows of a micro-batch: its weight, its
        weighted loss, of which a step has the gradient, others."""

    def average(self, weight: float | Tensor) -> Average | None:
        """The EMA's update, called last, as `after_step` may put other tensors in the place of
        buffers."""

    def record(self, totals: Tensor, weight: Tensor, norm: Tensor) -> None:
        """Called at the step's end with its sums over all ranks, what they are divided by (0-d; 1
        where nothing counts), and the norm of the gradient before clipping (0-d; not finite where
        a step in fp16 was skipped)."""


class ModelOps(Protocol):
    """What a model may use from the hardware it is built for; by default it is torch's own."""

    def recompute(self, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """`function(*tensors)` with activation checkpointing, where this hardware needs it."""
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
        """softmax(query key^T / sqrt(width) + bias) value, in this hardware's leanest form.

        query (batch, heads, queries, width); key, value (batch, heads, keys, width);
        bias broadcasts to (batch, heads, queries, keys). `causal` masks keys after the query.
        starts (batch, queries): the first key that each query attends to, where a row holds several
        samples; every query must be left a key.
        """
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
            # A GPU's kernels take one whose keys lie side by side; others cost all probabilities.
            bias = bias.to(query.dtype).contiguous()
        return F.scaled_dot_product_attention(query, key, value, bias, is_causal=causal)


class TorchOps(ModelOps):
    """`ModelOps` on any device of torch, for a model that stands by itself."""


def linear_dtype(x: Tensor) -> torch.dtype:
    """The type in which a linear layer computes with this input: autocast's, or its own."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


class Devices(Protocol):
    """The devices of a run: what they are, what they hold, and copies to and from them."""

    device: torch.device
    precision: Precision
    devices: int
    """Number of devices, over all ranks, that a batch is split over."""
    compiles: bool
    """Training compiles a program for each shape of its batches."""
    compiles_everything: bool
    """So does every other operation on a new shape; reading a value waits for a whole graph."""

    def describe(self, model: nn.Module | None = None) -> Mapping[str, str | int]:
        """Device names, counts, precision and versions, for the first lines of a run.

        model: a prepared model, to add what this hardware computes differently for it.
        """

    def usage(self) -> DeviceUsage:
        """Memory, utilization and fallbacks so far, where the device and its driver report them."""

    def compilations(self) -> int:
        """Number of graphs that this rank has compiled so far."""

    def batches(self, loader: Iterable[Mapping[str, Tensor]]) -> Iterator[Batch]:
        """The loader's batches on the device; the next ones are being sent meanwhile.

        Each rank loads its own rows, which are split over its devices here.
        """

    def to_host(
        self,
        tensors: Mapping[str, Tensor],
        *,
        to_save: bool = False,
        into: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Whole (unsharded) copies on the CPU. Every rank must call it.

        to_save: what this rank has to save, and no more: its shards (a DTensor on the CPU) of
            tensors that the ranks hold in shards, of others the main rank has a copy.
        into: an earlier call's copies, whose memory this one may use.
        """

    def load(self, targets: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
        """Copies whole host tensors into (possibly sharded) device tensors of the same names."""


class ModelSteps(Protocol):
    """A model on the devices, its forward passes and its optimizer steps."""

    def prepare(
        self, model: nn.Module | Callable[[], nn.Module], *, train: bool = True
    ) -> nn.Module:
        """The model on the device: DDP or FSDP over several, compiled where that is faster.

        Weights must be loaded before. Tied parameters stay tied.

        model: or what makes it, perhaps twice, its values a function of the seed it sets. Under
            FSDP the large tensors of the model that it returns may have none yet (`is_meta`): they
            are made one at a time, of which each rank keeps its shard.
        """

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The module behind a prepared model: its parameters, its own methods."""

    def call(self, model: nn.Module, function: Callable[..., Any], *arguments: Any) -> Any:
        """`function(module, *arguments)`, `module` being the one behind a prepared model.

        A forward pass of the prepared model, so that gradients are averaged whichever of the
        module's methods and parts the function calls.
        """

    def optimizer(
        self,
        groups: Sequence[ParameterGroup],
        settings: OptimizerSettings,
        own: torch.optim.Optimizer | None = None,
    ) -> torch.optim.Optimizer:
        """The optimizer that `settings` names over prepared parameters, or the task's own.

        Where a step is one graph its state exists from the start, unless weights or gradients
        decide it; elsewhere its first step makes it. Raises UsageError naming the class where an
        engine's step cannot be made of it.
        """

    def autocast(self, precision: Precision | None = None) -> AbstractContextManager[Any]:
        """The precision of a forward pass: the run's own, or another one to compare with.

        Around several passes with the same weights it casts each weight once, where that is faster.
        """

    def run(self, function: Callable[..., Any], batches: Sequence[Batch], *numbers: float) -> Any:
        """`function(batches, *numbers)`, one program for each shape where this hardware has that.

        function: a bound method that changes tensors of the device in place and may return some;
            beside them and `batches` it depends on nothing that changes. A program is given
            `numbers` as tensors (0-d), and runs none of its Python again.
        """

    def train_step(
        self, trained: Trained, batches: Sequence[Batch], lr: float, average_weight: float
    ) -> bool:
        """One optimizer step over its micro-batches; False where `forward` dropped it.

        Passes, gradients over all ranks, clipping, the optimizer, `after_step`, the EMA's update,
        `record`: one program for each shape where this hardware has that.

        lr: the step's rate; a group's own is `lr` times its `lr_scale`.
        average_weight: what `average` is given.

        User code in a backward pass sees what it sees in a loop of torch whose gradients DDP
        averages: the gradient of the ranks' mean, times the scale under fp16.
        """

    def finish(self) -> None:
        """Ends a step of evaluation or generation: executes its graph, reads nothing."""

    def state(self) -> BackendState:
        """This rank's gradient scaler."""

    def load_state(self, state: BackendState) -> None:
        """Restores the parts that are given and not empty."""


class Ranks(Protocol):
    """The processes of a run: one per GPU, one per TPU host."""

    rank: int
    world_size: int

    @property
    def is_main(self) -> bool:
        """Whether this rank prints and saves: rank 0."""

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sum of each rank's tensor; the tensor itself where one rank holds all devices."""

    def agree(self, numbers: Sequence[float]) -> Callable[[], list[float]]:
        """Begins to find the largest of all ranks' numbers; what it returns waits for them. For
        steps: a message of a few bytes, whatever the number of ranks."""

    def all_gather_objects(self, value: Any) -> list[Any]:
        """Each rank's value, in the order of ranks, on every rank; waits for all of them."""


class Backend(Devices, ModelSteps, Ranks, ModelOps, Protocol):
    """The hardware of a run. One object a rank; `tpukit.hardware.select.open_backend` builds it."""


class OpenedBackend(Backend, Protocol):
    """A backend for whoever opened it."""

    def memory_meter(self) -> AbstractContextManager[ReadMemory]:
        """Measures memory beyond what is used now, on the device or, on a CPU, of this process."""

    def close(self) -> None:
        """Releases process groups and worker threads. Safe to call twice."""
