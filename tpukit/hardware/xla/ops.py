"""What models use of XLA devices, and what their code meets while a step of it is traced.

No value is there to be looked at. Libraries ask `torch.compiler.is_compiling()` and leave out what
would look (transformers for its masks); a check whether values are finite is answered without
looking; attention is the backend's.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch_xla.utils.checkpoint import checkpoint

from tpukit.hardware.backend import TorchOps
from tpukit.hardware.kernels.flash_attention import fits, flash_attention, plain_attention
from tpukit.hardware.kernels.torch_attention import RUNNING
from tpukit.hardware.xla.kernel_calls import custom_call, split_call

LARGEST_SCORES_BYTES = 2**28
"""Maximum bytes of a device's float32 score matrix; larger ones are made in blocks of queries."""
MOST_BLOCKS = 16
"""Maximum number of blocks: each is a part of the graph and adds to the compile time."""


class XlaOps(TorchOps):
    """`ModelOps` for XLA devices.

    devices: how many devices a batch is split over.
    fused: whether the TPU's fused attention kernel can be used (a TPU, or a trace for one).
    mesh: torch_xla's mesh of those devices, where there are several.
    """

    def __init__(self, devices: int, *, fused: bool, mesh: Any = None) -> None:
        self.devices = devices
        self.fused = fused
        self.spmd_mesh = mesh

    def recompute(self, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """`function(*tensors)`; barriers keep XLA from merging the two computations of it."""
        if not torch.is_grad_enabled():
            return function(*tensors)
        if any(tensor.requires_grad for tensor in tensors):
            result: Tensor = checkpoint(function, *tensors, use_reentrant=True)
            return result
        # Without an input that needs a gradient, those of the function's weights would be lost.
        anchor = torch.zeros(1, device=tensors[0].device, requires_grad=True)
        anchored: Tensor = checkpoint(
            lambda _, *inputs: function(*inputs), anchor, *tensors, use_reentrant=True
        )
        return anchored

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
        if self.can_fuse(query, key, bias, starts, causal=causal):
            split = functools.partial(split_call, self.spmd_mesh)
            call = custom_call if self.spmd_mesh is None else split
            return flash_attention(query, key, value, bias, causal=causal, starts=starts, call=call)
        blocks = self._blocks(query, key)
        if blocks == 1:
            return plain_attention(query, key, value, bias, causal=causal, starts=starts)
        # A block of queries at a time, each computed again in the backward pass.
        queries, keys = query.shape[-2], key.shape[-2]
        size = math.ceil(queries / blocks)
        parts = []
        for start in range(0, queries, size):
            stop = min(start + size, queries)
            seen = min(stop, keys) if causal else keys
            inputs = [query[..., start:stop, :], key[..., :seen, :], value[..., :seen, :]]
            masks = {} if bias is None else {"bias": _part_of(bias, start, stop, seen)}
            masks |= {} if starts is None else {"starts": starts[:, start:stop]}
            block = functools.partial(_block, causal, start, [*masks])
            parts.append(self.recompute(block, *inputs, *masks.values()))
        return torch.cat(parts, dim=-2)

    def can_fuse(
        self, query: Tensor, key: Tensor, bias: Tensor | None = None,
        starts: Tensor | None = None, *, causal: bool,
    ) -> bool:  # fmt: skip
        """Whether the fused kernel takes these shapes."""
        whole = query.shape[0] % self.devices == 0
        return self.fused and whole and fits(query, key, bias, starts, causal=causal)

    def _blocks(self, query: Tensor, key: Tensor) -> int:
        batch, heads, queries, _ = query.shape
        scores_bytes = 4 * batch * heads * queries * key.shape[-2] // self.devices
        return max(1, min(MOST_BLOCKS, queries, math.ceil(scores_bytes / LARGEST_SCORES_BYTES)))


def _block(causal: bool, start: int, masks: Sequence[str], *tensors: Tensor) -> Tensor:
    """Attention of queries `start`, `start` + 1, ...; masks: what the tensors after three are."""
    named = dict(zip(masks, tensors[3:], strict=True))
    return plain_attention(*tensors[:3], causal=causal, start=start, **named)


def _part_of(bias: Tensor, start: int, stop: int, seen: int) -> Tensor:
    rows = bias if bias.shape[-2] == 1 else bias[..., start:stop, :]
    return rows if rows.shape[-1] == 1 else rows[..., :seen]


# -- a model's code while it is traced -------------------------------------------------------------
class FiniteCheck(Tensor):
    """Which values are finite (or infinite, or NaN), and the constant answer to `if` and `not`.

    A traced step has no branches: DETR, which clamps its activations where one is infinite, does
    without. The engine looks at the loss itself.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    answer: bool

    def all(self, *how: Any, **named: Any) -> Tensor:
        return _answering(super().all(*how, **named), self.answer)

    def any(self, *how: Any, **named: Any) -> Tensor:
        return _answering(super().any(*how, **named), self.answer)

    def __bool__(self) -> bool:
        return self.answer


def _answering(found: Tensor, answer: bool) -> Tensor:
    if found.device.type != "xla":
        return found
    check = found.as_subclass(FiniteCheck)
    check.answer = answer
    return check


def _check(function: Callable[[Tensor], Tensor], answer: bool) -> Callable[[Tensor], Tensor]:
    return lambda values: _answering(function(values), answer)


REPLACED: tuple[tuple[Any, str, Any], ...] = (
    (torch.compiler, "_is_compiling_flag", True),
    (torch, "_check_tensor_all", lambda *_: None),
    (torch, "isfinite", _check(torch.isfinite, True)),
    (torch, "isinf", _check(torch.isinf, False)),
    (torch, "isnan", _check(torch.isnan, False)),
)


@contextmanager
def running(ops: XlaOps) -> Iterator[None]:
    """Around a model's forward and backward passes: they are traced on `ops`."""
    before = [getattr(owner, name) for owner, name, _ in REPLACED]
    token = RUNNING.set(ops)
    try:
        for owner, name, value in REPLACED:
            setattr(owner, name, value)
        # A second thread numbers its own nodes: second derivatives would add up in another order
        # in each step, which is another graph.
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        RUNNING.reset(token)
        for (owner, name, _), value in zip(REPLACED, before, strict=True):
            setattr(owner, name, value)
