"""How a model is spread over eager ranks: single-process, replicated (DDP) or sharded (FSDP)."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from tpukit.errors import UsageError
from tpukit.hardware.eager.buffers import share_buffers, synchronized_batch_norm
from tpukit.hardware.eager.compiling import is_recorded
from tpukit.hardware.modules import local, repeated_blocks


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

NOT_GATHERED = "got mixed torch.Tensor and DTensor"
"""torch's error where a shard is used as if it were the whole."""

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


class FSDP(SingleProcess):
    """Every rank holds a shard of each parameter, its gradient and its optimizer state."""

    is_recordable = False

    def __init__(
        self,
        mesh: Any,
        place: Callable[[nn.Module], nn.Module] | None = None,
        *,
        sync_batchnorm: bool = False,
    ) -> None:
        # Without a place `fully_shard` moves the model.
        super().__init__(place or (lambda model: model), sync_batchnorm=sync_batchnorm)
        self.mesh = mesh

    def prepare(self, model: nn.Module, *, train: bool) -> nn.Module:
        model = self.place(model)
        scalars = {parameter for parameter in model.parameters() if parameter.ndim == 0}
        for block in repeated_blocks(model):
            fully_shard(block, mesh=self.mesh, ignored_params=scalars)
        # Left whole after an evaluation, weights would be copies that an exchange never reaches.
        for part in _called_parts(model):
            fully_shard(part, mesh=self.mesh, reshard_after_forward=True, ignored_params=scalars)
            part.register_forward_hook(_watch_gradients)
        for module in _sharded(model):
            # Sums, not means; and means over gloo are sums in torch 2.8.
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
        for tensor in (*_whole(model), *model.buffers()):
            tensor.data = tensor.data.to(self.mesh.device_type)
        return model

    def call(self, model: nn.Module, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(model, *arguments)
        except RuntimeError as error:
            if NOT_GATHERED not in str(error):
                raise
            raise UsageError(
                "--shard: the model uses weights of a module that it does not call: they were not"
                " gathered.",
                "Call the module (`layer(x)`, not `layer.forward(x)` or `layer.weight`), or leave"
                " --shard out.",
                id="shard",
            ) from error

    @contextmanager
    def micro_batch(self, model: nn.Module, *, last: bool) -> Iterator[None]:
        for module in _sharded(model):
            module.set_requires_gradient_sync(last, recurse=False)
        with synchronized_batch_norm() if self.sync_batchnorm else nullcontext():
            yield
        if last:
            for parameter in _whole(model):
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
            self.share(model)

    def share(self, model: nn.Module) -> None:
        share_buffers(model)

    def norms(self, gradients: Sequence[Tensor]) -> Tensor:
        squares = super().norms([local(gradient) for gradient in gradients]).square()
        # What is whole is on every rank, and counts once.
        counts = [isinstance(g, DTensor) or dist.get_rank() == 0 for g in gradients]
        if not all(counts):
            squares *= torch.tensor(counts, device=squares.device)
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


def _whole(model: nn.Module) -> list[nn.Parameter]:
    """Parameters that every rank holds: those without an axis to cut, and a container's own."""
    return [parameter for parameter in model.parameters() if not isinstance(parameter, DTensor)]


def split_mixed_groups(optimizer: torch.optim.Optimizer) -> None:
    """Gives parameters that are not sharded groups of their own: no operation takes both kinds."""
    for group in list(optimizer.param_groups):
        sharded = [p for p in group["params"] if isinstance(p, DTensor)]
        plain = [p for p in group["params"] if not isinstance(p, DTensor)]
        if sharded and plain:
            group["params"] = sharded
            optimizer.add_param_group({**group, "params": plain})


# DDP compares annotations with types, which they are not here: see the future import above.
def sum_gradients(state, bucket):  # type: ignore[no-untyped-def]
    """DDP's reduction without its division: gradients of sums add up."""
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0])
