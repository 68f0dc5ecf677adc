"""What models use of XLA devices: activation checkpointing with barriers, and lean attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch_xla.utils.checkpoint import checkpoint

from tpukit.hardware.backend import TorchOps
from tpukit.hardware.xla.flash_attention import fits, flash_attention

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
        # The kernel takes a bias or the starts of causal attention.
        allowed = starts is None or (bias is None and causal)
        if allowed and self.can_fuse(query, key, bias, causal=causal):
            return flash_attention(
                query, key, value, bias, causal=causal, starts=starts, mesh=self.spmd_mesh
            )
        blocks = self._blocks(query, key)
        if blocks == 1:
            return plain_attention(query, key, value, bias, causal=causal, starts=starts)
        return self._blocked_attention(
            query, key, value, bias, blocks, causal=causal, starts=starts
        )

    def can_fuse(self, query: Tensor, key: Tensor, bias: Tensor | None, *, causal: bool) -> bool:
        """Whether the fused kernel takes these shapes."""
        whole = query.shape[0] % self.devices == 0
        return self.fused and whole and fits(query, key, bias, causal=causal)

    def _blocks(self, query: Tensor, key: Tensor) -> int:
        batch, heads, queries, _ = query.shape
        scores_bytes = 4 * batch * heads * queries * key.shape[-2] // self.devices
        return max(1, min(MOST_BLOCKS, queries, math.ceil(scores_bytes / LARGEST_SCORES_BYTES)))

    def _blocked_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        blocks: int,
        *,
        causal: bool,
        starts: Tensor | None,
    ) -> Tensor:
        """Attention a block of queries at a time, each computed again in the backward pass."""
        queries, keys = query.shape[-2], key.shape[-2]
        size = math.ceil(queries / blocks)
        parts = []
        for start in range(0, queries, size):
            stop = min(start + size, queries)
            seen = min(stop, keys) if causal else keys
            inputs = [query[..., start:stop, :], key[..., :seen, :], value[..., :seen, :]]
            if bias is not None:
                inputs.append(_part_of(bias, start, stop, seen))
            if starts is not None:
                inputs.append(starts[:, start:stop])
            block = _Block(start, causal=causal, packed=starts is not None)
            parts.append(self.recompute(block, *inputs))
        return torch.cat(parts, dim=-2)


class _Block:
    """Attention of queries `start`, `start` + 1, ... to the keys given."""

    def __init__(self, start: int, *, causal: bool, packed: bool) -> None:
        self.start = start
        self.causal = causal
        self.packed = packed

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *further: Tensor) -> Tensor:
        """further: the bias, where there is one, and with `packed` the starts."""
        bias = further[: len(further) - self.packed]
        return plain_attention(
            query, key, value, *bias, causal=self.causal, start=self.start,
            starts=further[-1] if self.packed else None,
        )  # fmt: skip


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    *,
    causal: bool = False,
    start: int = 0,
    starts: Tensor | None = None,
) -> Tensor:
    """Attention written out, its softmax in float32. The first query is number `start`."""
    scores = torch.matmul(query * query.shape[-1] ** -0.5, key.transpose(-2, -1)).float()
    if bias is not None:
        scores = scores + bias.float()
    columns = torch.arange(key.shape[-2], device=query.device)
    if causal:
        rows = torch.arange(start, start + query.shape[-2], device=query.device)
        scores = scores.masked_fill(columns > rows[:, None], float("-inf"))
    if starts is not None:
        scores = scores.masked_fill(columns < starts[:, None, :, None], float("-inf"))
    return torch.matmul(torch.softmax(scores, dim=-1).to(value.dtype), value)


def _part_of(bias: Tensor, start: int, stop: int, seen: int) -> Tensor:
    rows = bias if bias.shape[-2] == 1 else bias[..., start:stop, :]
    return rows if rows.shape[-1] == 1 else rows[..., :seen]
