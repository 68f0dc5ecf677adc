"""What ranks share beside gradients: buffers after each step, and BatchNorm's statistics."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.modules.batchnorm import _NormBase

from tpukit.hardware.modules import persistent_buffers

SENT_AS_BYTES = (torch.int16, torch.uint16, torch.uint32, torch.uint64)
"""Types that neither gloo nor NCCL sends."""


@torch.no_grad()
def share_buffers(model: nn.Module) -> None:
    """Gives every rank the same persistent buffers, so that what is saved is what all go on with.

    Running statistics in training become the ranks' mean; other buffers are those of rank 0.
    """
    averaged = [
        statistic
        for module in model.modules()
        if isinstance(module, _NormBase) and module.training
        for statistic in (module.running_mean, module.running_var)
        if statistic is not None
    ]
    known = set(map(id, averaged))
    others = [b for b in persistent_buffers(model).values() if id(b) not in known]
    for tensors in _by_dtype(averaged):
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat)
        _fill(tensors, flat / dist.get_world_size())
    for tensors in _by_dtype(others):
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.broadcast(flat.view(torch.uint8) if flat.dtype in SENT_AS_BYTES else flat, 0)
        _fill(tensors, flat)


def _by_dtype(tensors: list[Tensor]) -> list[list[Tensor]]:
    ordered = sorted(tensors, key=lambda tensor: str(tensor.dtype))
    return [list(group) for _, group in itertools.groupby(ordered, lambda t: t.dtype)]


def _fill(tensors: list[Tensor], flat: Tensor) -> None:
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view_as(tensor))


@contextmanager
def synchronized_batch_norm() -> Iterator[None]:
    """Within the context every BatchNorm in training normalizes by the rows of all ranks.

    As torch's SyncBatchNorm, but on any device: torch's refuses the CPU.
    """
    own = F.batch_norm

    def batch_norm(
        input: Tensor, running_mean: Tensor | None, running_var: Tensor | None,
        weight: Tensor | None = None, bias: Tensor | None = None, training: bool = False,
        momentum: float = 0.1, eps: float = 1e-5,
    ) -> Tensor:  # fmt: skip
        chosen = _batch_norm_of_all_ranks if training else own
        return chosen(input, running_mean, running_var, weight, bias, training, momentum, eps)

    F.batch_norm = batch_norm
    try:
        yield
    finally:
        F.batch_norm = own


def _batch_norm_of_all_ranks(
    rows: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None,
    bias: Tensor | None, training: bool, momentum: float, eps: float,
) -> Tensor:  # fmt: skip
    """`rows` (rows, channels, ...) as one rank with the rows of all would normalize them."""
    values, channels = rows.float(), (1, -1, *[1] * (rows.ndim - 2))
    axes = [axis for axis in range(rows.ndim) if axis != 1]
    count = torch.full((1,), values.numel() / values.shape[1], device=rows.device)
    sums = _sum_over_ranks(torch.cat([values.sum(axes), count]))
    total = sums[-1]
    mean = sums[:-1] / total
    centered = values - mean.view(channels)
    variance = _sum_over_ranks(centered.square().sum(axes)) / total
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            running_mean.lerp_(mean, momentum)
            running_var.lerp_(variance * total / (total - 1), momentum)
    normalized = centered * (variance + eps).rsqrt().view(channels)
    if weight is not None and bias is not None:
        normalized = normalized * weight.view(channels) + bias.view(channels)
    return normalized.to(rows.dtype)


def _sum_over_ranks(tensor: Tensor) -> Tensor:
    """The sum over the ranks; its gradient is summed likewise."""
    summed: Tensor = all_reduce(tensor)  # type: ignore[no-untyped-call]
    return summed
