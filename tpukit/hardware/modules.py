"""Modules and tensors of any backend: blocks, ties, placement, a generator's state."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from tpukit.errors import UsageError


def move_tensors(
    model: nn.Module,
    parameter: Callable[[Tensor], Tensor],
    buffer: Callable[[Tensor], Tensor],
    only: Callable[[Tensor], bool] = lambda tensor: True,
) -> None:
    """Moves a model, or the tensors of it that `only` takes, to another device in place; ties
    between its parameters stay.

    `.to` would give each tied parameter a copy where a tensor cannot change its device.
    """
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, old in module.named_parameters(recurse=False):
            if not only(old):
                continue
            if id(old) not in moved:
                moved[id(old)] = _like(old, parameter(old.detach()))
            module._parameters[name] = moved[id(old)]
        for name, old_buffer in module.named_buffers(recurse=False):
            if only(old_buffer):
                setattr(module, name, buffer(old_buffer))


def _like(old: nn.Parameter, value: Tensor) -> nn.Parameter:
    """A parameter with the attributes and hooks of another one: `no_decay`, a mask of gradients."""
    made = nn.Parameter(value, requires_grad=old.requires_grad)
    made.__dict__.update(old.__dict__)
    made._backward_hooks = old._backward_hooks
    made._post_accumulate_grad_hooks = old._post_accumulate_grad_hooks
    return made


def require_unpacked(model: nn.Module, where: str) -> None:
    """Raises UsageError for weights that bitsandbytes packed, as only its kernels compute with."""
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "quant_state"):
            raise UsageError(
                f"{where}: {name!r} is packed into 4 bits: a GPU or CPU holds and computes with it"
                " whole.",
                "Use --set weights=bf16, or GPUs without --shard.",
                id="packed-weights",
            )


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The layers of a model's stacks: each is gathered by itself when its turn comes.

    Layers are siblings of one class. What shares a parameter with the rest of the model stays with
    the model as a whole, and so does a single part: its parent may use its weights directly.
    """
    stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    blocks = [layer for stack in stacks for layer in _layers(stack)]
    inner = {id(child) for block in blocks for child in block.modules() if child is not block}
    return [b for b in blocks if id(b) not in inner and _uses(b) == _uses(model, within=b)]


def _layers(stack: nn.ModuleList) -> Iterator[nn.Module]:
    """The modules of a list that have parameters, a forward pass and a sibling of their class."""
    kinds = Counter(map(type, stack))
    for module in stack:
        called = type(module).forward is not nn.Module.forward
        if called and kinds[type(module)] > 1 and any(True for _ in module.parameters()):
            yield module


def _uses(model: nn.Module, within: nn.Module | None = None) -> int:
    """How often the model's modules hold a parameter (of `within`)."""
    wanted = {id(p) for p in (within or model).parameters()}
    return sum(
        id(parameter) in wanted
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
    )


def has_batch_norm(model: nn.Module) -> bool:
    """Whether a model normalizes by the statistics of a batch."""
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def is_made_later(tensor: Tensor) -> bool:
    """Whether it has no values yet: `is_meta` does not say so while its model is made."""
    with torch._C.DisableTorchFunction():  # type: ignore[no-untyped-call]
        return tensor.is_meta


def local(tensor: Tensor) -> Tensor:
    """The shard of a tensor that this rank holds, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def exchange(left: Sequence[Tensor], right: Sequence[Tensor]) -> None:
    """Swaps the contents of two lists of device tensors pairwise."""
    for one, other in zip(left, right, strict=True):
        if one.device.type == "xla" or one.shape != other.shape:
            # The handles change places: nothing is copied, nothing is traced.
            one.data, other.data = other.data, one.data
        else:
            kept = one.detach().clone()
            one.copy_(other)
            other.copy_(kept)


@torch.no_grad()
def move_towards(
    targets: Sequence[Tensor],
    sources: Sequence[Tensor],
    weight: float | Tensor,
    copies: Sequence[Tensor] = (),
    originals: Sequence[Tensor] = (),
) -> None:
    """`Average`; a weight (0-d) on the device makes one graph for all weights."""
    averaged = [(local(t), local(s)) for t, s in zip(targets, sources, strict=True)]
    if isinstance(weight, Tensor):
        for target, source in averaged:
            target.lerp_(source, weight.to(target.dtype))
    elif averaged:
        torch._foreach_lerp_([t for t, _ in averaged], [s for _, s in averaged], weight)
    due = weight > 0
    for copy, original in zip(copies, originals, strict=True):
        copy.copy_(torch.where(due, original, copy) if isinstance(due, Tensor) else original)


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that a state dict holds (running statistics, counts), by name."""
    passing = {
        f"{prefix}.{name}".removeprefix(".")
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    return {name: buffer for name, buffer in model.named_buffers() if name not in passing}


def running_statistics(model: nn.Module) -> set[str]:
    """Names of the buffers that are means over batches: those of BatchNorm and InstanceNorm."""
    return {
        f"{prefix}.{name}".removeprefix(".")
        for prefix, module in model.named_modules()
        if isinstance(module, _NormBase)
        for name in ("running_mean", "running_var")
    }


def renormalized_weights(model: nn.Module) -> set[str]:
    """Names of the weights that a forward pass writes to: of embeddings with `max_norm`."""
    return {
        f"{prefix}.weight".removeprefix(".")
        for prefix, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None
    }
