"""How a model is spread over eager ranks: single-process, replicated (DDP) or sharded (FSDP)."""

import random
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from tpukit.errors import UsageError
from tpukit.hardware.eager.buffers import share_buffers, synchronized_batch_norm
from tpukit.hardware.eager.compiling import is_recorded
from tpukit.hardware.eager.deferred import Deferred, deferred
from tpukit.hardware.modules import (
    local,
    move_tensors,
    renormalized_weights,
    repeated_blocks,
    require_unpacked,
)
from tpukit.hardware.optimizers import steppers


class SingleProcess:
    """Where a model's parameters and gradients are over the ranks of a run: here on a single one.

    After the last micro-batch every rank holds the sum of all gradients, or its shard of it.
    is_recordable: whether a step can be one program of torch_tpu.
    sync_batchnorm: whether BatchNorm normalizes by the rows of all ranks.
    """

    is_recordable = True

    def __init__(
        self, place: Callable[[nn.Module], nn.Module], *, sync_batchnorm: bool = False
    ) -> None:
        self.place = place
        self.sync_batchnorm = sync_batchnorm

    def make(self, function: Callable[[], nn.Module]) -> nn.Module:
        """The model that a function makes, which `prepare` takes."""
        return function()

    def prepare(self, model: nn.Module, *, train: bool) -> nn.Module:
        return self.place(model)

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model

    def call(self, model: nn.Module, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(model, *arguments)

    def micro_batch(self, model: nn.Module, *, last: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def share(self, model: nn.Module) -> None:
        """Gives every rank the same persistent buffers."""

    def draw_alike(self, seed: int) -> None:
        """Has the ranks draw the same in the optimizer's step, where each makes all of it."""

    def norms(self, gradients: Sequence[Tensor]) -> Tensor:
        """(gradients,): the norm of each, of all its shards."""
        if not gradients:
            return torch.zeros(0)
        return torch.stack(torch._foreach_norm(list(gradients)))

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor.detach()

    def fill(self, target: Tensor, value: Tensor) -> None:
        target.detach().copy_(value)


NONE_UNUSED = "find_unused_parameters=True was specified"
"""torch's warning where all parameters are used."""

NOT_GATHERED = re.compile(r"got mixed torch.Tensor and DTensor|no attribute '_local_tensor'")
"""torch's errors where a shard is used as if it were the whole."""

NOT_IN_HALF = re.compile(r"must have the same dtype|weight type .* should be the same")
"""torch's errors where a layer whose weights are in half precision computes in fp32."""

IN_HALF = {
    layer.forward
    for layer in (
        nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d,
        nn.ConvTranspose3d, nn.MultiheadAttention,
    )
}  # fmt: skip
"""Forward passes that under autocast use the layer's weights in half precision alone."""
THEIR_WEIGHTS = {"weight", "bias", "in_proj_weight", "in_proj_bias", "q_proj_weight",
                 "k_proj_weight", "v_proj_weight"}  # fmt: skip
LEAST_SHARDED = 31 / 32
"""Share of a layer's weights that autocast has in half precision, for gathers in half precision."""

COMPARED_PASSES = 3
"""Micro-batches in which the ranks compare which layers they call and have gradients of."""

DDP_OPTIONS: Mapping[str, Any] = {
    "gradient_as_bucket_view": True,
    # A pooler that no loss uses, layers that are dropped: else the ranks wait for their gradients.
    "find_unused_parameters": True,
    # Ranks share them after each step instead.
    "broadcast_buffers": False,
}


class Called(nn.Module):
    """A module whose forward pass is a function of it: what DDP wraps.

    A loss may then use any method, part or attribute of the module.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(self.module, *arguments)


class DDP(SingleProcess):
    """Every rank holds a replica; gradients are summed over the ranks.

    In a program of torch_tpu the sum is a part of it: DDP's own works outside of programs.
    """

    def prepare(self, model: nn.Module, *, train: bool) -> nn.Module:
        if not train:
            return self.place(model)
        wrapped = DistributedDataParallel(self.place(Called(model)), **DDP_OPTIONS)
        wrapped.register_comm_hook(None, sum_gradients)
        return wrapped

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model.module.module if isinstance(model, DistributedDataParallel) else model

    def call(self, model: nn.Module, function: Callable[..., Any], *arguments: Any) -> Any:
        if isinstance(model, DistributedDataParallel) and not is_recorded():
            return model(function, *arguments)
        return function(self.unwrap(model), *arguments)

    @contextmanager
    def micro_batch(self, model: nn.Module, *, last: bool) -> Iterator[None]:
        waiting = None if last or not isinstance(model, DistributedDataParallel) else model
        with (
            synchronized_batch_norm() if self.sync_batchnorm else nullcontext(),
            waiting.no_sync() if waiting else nullcontext(),
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings("ignore", message=NONE_UNUSED)
            yield
        if last and is_recorded():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
        if last:
            self.share(model)

    def share(self, model: nn.Module) -> None:
        share_buffers(model)

    def draw_alike(self, seed: int) -> None:
        # Else replicas part where the optimizer or `after_step` draws (noise, weights anew).
        if not is_recorded():
            random.seed(seed)
            np.random.seed(seed % 2**32)
            torch.manual_seed(seed)


class FSDP(SingleProcess):
    """Every rank holds a shard of each parameter, its gradient and its optimizer state.

    Under autocast layers are gathered in its precision, else its copies of their weights would stay
    until the backward pass. What it leaves in fp32 (norms' weights), every rank then holds whole.
    """

    is_recordable = False

    def __init__(
        self,
        mesh: Any,
        place: Callable[[nn.Module], nn.Module] | None = None,
        *,
        half: torch.dtype | None = None,
        sync_batchnorm: bool = False,
        compared: int = COMPARED_PASSES,
    ) -> None:
        """half: autocast's precision; None: it is off. compared: passes in which the ranks compare
        which layers they call; of a trace, which has no other ranks, 0."""
        # Without a place `fully_shard` moves the model.
        super().__init__(place or (lambda model: model), sync_batchnorm=sync_batchnorm)
        self.mesh, self.half = mesh, half
        self._left, self._compares = compared, False
        self._defers = place is None
        self._deferred: Deferred | None = None
        """What makes the large tensors of the model that was made last."""

    def make(self, function: Callable[[], nn.Module]) -> nn.Module:
        if not self._defers:
            return super().make(function)
        model, self._deferred = deferred(function)
        return model

    def prepare(self, model: nn.Module, *, train: bool) -> nn.Module:
        require_unpacked(model, "--shard")
        later, self._deferred = self._deferred, None
        unfilled = {n: p for n, p in model.named_parameters() if later is not None and p.is_meta}
        model = self.place(model)
        # FSDP shards floats alone: its shards require gradients when they are made.
        is_float = {p: p.is_floating_point() or p.is_complex() for p in model.parameters()}
        whole = {p for p, is_one in is_float.items() if p.ndim == 0 or not is_one}
        # What a pass writes to what was gathered is lost.
        whole |= {model.get_parameter(name) for name in renormalized_weights(model)}
        # Its shard is another parameter, which has none of its hooks.
        whole |= {p for p in is_float if p._backward_hooks or p._post_accumulate_grad_hooks}
        in_half = set() if self.half is None else _in_half(model)
        for block in repeated_blocks(model):
            self._shard(block, in_half, whole)
        for part in _called_parts(model):
            self._shard(part, in_half, whole)
            part.register_forward_hook(_watch_gradients)
        groups = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for place, module in enumerate(groups):
            module.register_forward_pre_hook(partial(self._require_same_call, place), prepend=True)
            # Sums, not means; and means over gloo are sums in torch 2.8.
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
        if later is not None:
            self._fill(model, unfilled, later)
        for tensor in (*_whole(model), *model.buffers()):
            tensor.data = tensor.data.to(self.mesh.device_type)
        return model

    def _fill(self, model: nn.Module, unfilled: Mapping[str, Tensor], later: Deferred) -> None:
        """Makes the tensors without values one at a time; of a sharded one a rank's part stays."""
        move_tensors(model, later.value, later.value, only=_is_whole_and_unfilled)
        device = self.mesh.device_type
        model._apply(  # type: ignore[no-untyped-call]
            lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor
        )
        for name, parameter in model.named_parameters():
            if name in unfilled and isinstance(parameter, DTensor):
                self.fill(parameter, later.value(unfilled[name]))

    def _shard(
        self, module: nn.Module, in_half: set[nn.Parameter], whole: set[nn.Parameter]
    ) -> None:
        """Makes a module one group, gathered at once; adds to `whole` what stays out of it."""
        own = [p for p in module.parameters() if p not in whole and not isinstance(p, DTensor)]
        # The gradients of a group have one type.
        trained = [p for p in own if p.requires_grad]
        sizes = {d: _count(p for p in trained if p.dtype == d) for d in {p.dtype for p in trained}}
        whole.update(p for p in trained if sizes[p.dtype] < max(sizes.values()))
        policy = MixedPrecisionPolicy()
        if _count(p for p in own if p in in_half) > LEAST_SHARDED * _count(own):
            policy = MixedPrecisionPolicy(
                self.half, reduce_dtype=torch.float32, cast_forward_inputs=False
            )
            whole.update(p for p in own if p not in in_half)
        # Left whole after an evaluation, weights would be copies that an exchange never reaches.
        fully_shard(
            module, mesh=self.mesh, reshard_after_forward=True, mp_policy=policy,
            ignored_params=whole,
        )  # fmt: skip

    def _require_same_call(self, place: int, *_: Any) -> None:
        """Else each rank would gather a part of its own layer, and get the other one's."""
        if self._compares:
            self._require_same([place])

    def _require_same(self, found: Sequence[int]) -> None:
        """Raises UsageError where another rank uses other layers, in this pass or this order."""
        both = torch.tensor([found, [-one for one in found]], device=self.mesh.device_type)
        dist.all_reduce(both, dist.ReduceOp.MAX)
        if both.sum(0).any():
            raise UsageError(
                "--shard: the ranks do not use the same layers in the same order: a layer is left"
                " out by a random draw, or where a rank has no rows for it.",
                "Draw with Python's `random`, which the ranks draw alike, and call each layer"
                " in each pass; or leave --shard out.",
                id="shard",
            )

    def call(self, model: nn.Module, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            returned = function(model, *arguments)
            self._require_same_call(-1)
            self._compares = False
            return returned
        except (RuntimeError, AttributeError) as error:
            if self.half is not None and NOT_IN_HALF.search(str(error)):
                raise UsageError(
                    "--shard: the model computes in fp32 (`autocast(enabled=False)`)"
                    f" with weights that are gathered in half precision: {error}.",
                    "Use --precision fp32, or leave --shard out.",
                    id="shard",
                ) from error
            if not NOT_GATHERED.search(str(error)):
                raise
            raise UsageError(
                "--shard: weights are used outside of the model's forward pass, or of a module that"
                " is not called: they were not gathered.",
                "Use them in the model's `forward`, and call modules (`layer(x)`, not"
                " `layer.forward(x)` or `layer.weight`), or leave --shard out.",
                id="shard",
            ) from error

    @contextmanager
    def micro_batch(self, model: nn.Module, *, last: bool) -> Iterator[None]:
        compares = self._compares = self._left > 0
        self._left -= 1
        for module in _sharded(model):
            module.set_requires_gradient_sync(last, recurse=False)
        with synchronized_batch_norm() if self.sync_batchnorm else nullcontext():
            yield
        if compares and last:
            self._require_same([int(p.grad is not None) for p in model.parameters()])
        if last:
            _sum_over_ranks([p.grad for p in _whole(model) if p.grad is not None])
            self.share(model)

    def share(self, model: nn.Module) -> None:
        share_buffers(model)

    def norms(self, gradients: Sequence[Tensor]) -> Tensor:
        if not gradients:
            return super().norms(gradients)
        norms = torch._foreach_norm([local(gradient) for gradient in gradients])
        # What is whole is on every rank, and counts once.
        again = [n for n, g in zip(norms, gradients, strict=True) if not isinstance(g, DTensor)]
        if again and dist.get_rank() > 0:
            torch._foreach_zero_(again)
        squares = torch.stack(norms).square()
        dist.all_reduce(squares)
        return squares.sqrt()

    def whole(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        return super().whole(tensor)

    def fill(self, target: Tensor, value: Tensor) -> None:
        if isinstance(target, DTensor):
            # Every rank has read the same values: each takes its own shard of them.
            value = distribute_tensor(
                value.to(target.device), target.device_mesh, target.placements, src_data_rank=None
            )
        super().fill(target, value)


def _watch_gradients(_module: nn.Module, _inputs: Any, outputs: Any) -> None:
    for tensor in tree_leaves(outputs):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(_require_first_order)  # type: ignore[no-untyped-call]


def _require_first_order(_gradient: Tensor) -> None:
    """FSDP frees the gathered weights that a gradient of this gradient would read."""
    if torch.is_grad_enabled():  # create_graph=True
        raise UsageError(
            "--shard: the loss takes a gradient of a gradient (`create_graph=True`), for which"
            " sharded weights are not kept.",
            "Leave --shard out.",
            id="shard",
        )


def _in_half(model: nn.Module) -> set[nn.Parameter]:
    """Weights in fp32 that autocast has in half precision wherever they are used.

    A layer with a forward pass of its own names them in its class's `weights_in_half`.
    """
    found, others = set[nn.Parameter](), set[nn.Parameter]()
    for module in model.modules():
        kind = type(module)
        cast = THEIR_WEIGHTS if kind.forward in IN_HALF else getattr(kind, "weights_in_half", ())
        for name, parameter in module.named_parameters(recurse=False):
            is_cast = name in cast and parameter.dtype == torch.float32
            (found if is_cast else others).add(parameter)
    return found - others


def _count(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _called_parts(model: nn.Module) -> Iterator[nn.Module]:
    """The model, or where it is a container without a forward pass (a GAN's ModuleDict) its
    outermost parts that have one: in that pass their weights are gathered."""
    if type(model).forward is not nn.Module.forward:
        yield model
    else:
        for child in model.children():
            yield from _called_parts(child)


def _sharded(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def _is_whole_and_unfilled(tensor: Tensor) -> bool:
    return tensor.is_meta and not isinstance(tensor, DTensor)


def _whole(model: nn.Module) -> list[nn.Parameter]:
    """Parameters that every rank holds: those without an axis to cut, a container's own, and what
    autocast leaves in fp32 among layers in half precision."""
    return [parameter for parameter in model.parameters() if not isinstance(parameter, DTensor)]


def _sum_over_ranks(gradients: Sequence[Tensor]) -> None:
    """Sums in place, those of a dtype in one message."""
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        same = [gradient for gradient in gradients if gradient.dtype == dtype]
        flat = torch.cat([gradient.flatten() for gradient in same])
        dist.all_reduce(flat)
        totals = torch.split_with_sizes(flat, [gradient.numel() for gradient in same])
        for gradient, total in zip(same, totals, strict=True):
            gradient.copy_(total.view_as(gradient))


def split_mixed_groups(optimizer: torch.optim.Optimizer) -> None:
    """Gives parameters that are not sharded groups of their own: no operation takes both kinds.

    Raises UsageError for an optimizer that takes no other group than those it was made with.
    """
    before = _parameters_of(optimizer)
    for group in list(optimizer.param_groups):
        sharded = [p for p in group["params"] if isinstance(p, DTensor)]
        plain = [p for p in group["params"] if not isinstance(p, DTensor)]
        if sharded and plain:
            group["params"] = sharded
            optimizer.add_param_group({**group, "params": plain})
    if _parameters_of(optimizer) != before:
        raise UsageError(
            f"--shard: {type(optimizer).__name__} loses a group that is added to it, here of"
            " parameters that every rank holds whole.",
            "Return one torch.optim optimizer of all groups, or leave --shard out.",
            id="optimizer",
        )


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[set[int]]:
    """The parameters of an optimizer, and of those that it steps."""
    groups = [each.param_groups for each in steppers(optimizer)]
    return [{id(p) for group in of_one for p in group["params"]} for of_one in groups]


# DDP compares annotations with types, which they are not here: see the future import above.
def sum_gradients(state, bucket):  # type: ignore[no-untyped-def]
    """DDP's reduction without its division: gradients of sums add up."""
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0])
