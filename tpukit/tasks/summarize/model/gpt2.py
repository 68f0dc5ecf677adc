"""GPT-2 (Radford et al., 2019), lean: the vocabulary is projected where a token is wanted only.

One `forward` serves training, prefilling and decoding, so that any wrapper around the module
(DDP, FSDP, a compiler) serves all three.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tpukit.hardware.backend import ModelOps, TorchOps


@dataclass(frozen=True)
class GPT2Config:
    """A GPT-2's shape."""

    layers: int = 12
    heads: int = 12
    width: int = 768
    vocabulary_size: int = 50257
    block_size: int = 1024
    """Positions the model knows."""
    exact_gelu: bool = False
    """nanoGPT trains with the exact GELU, OpenAI with the tanh approximation."""
    norm_eps: float = 1e-5
    dropout: float = 0.0
    recompute: bool = False
    """Blocks are computed again in the backward pass instead of being kept."""


class KeyValues(NamedTuple):
    """The KV cache: keys and values of past tokens in a ring that all rows share.

    keys, values: for each layer (rows, heads, cache positions, width of a head). A token's position
    is learned and added to the input, so the order in the cache means nothing to attention: every
    row writes its next token into the same cache position, and `visible` says which are its own.
    """

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    cache_position: Tensor
    """(1,): where this step's keys and values go."""
    visible: Tensor
    """(rows, cache positions): whether a row attends to a position, this step's included."""


class PlainOps(TorchOps):
    """Operations as torch writes them whatever the hardware has: the form to compare with."""

    def __init__(self, ops: ModelOps) -> None:
        self.ops = ops

    def recompute(self, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        return self.ops.recompute(function, *tensors)


class LayerPast(NamedTuple):
    """One layer's part of `KeyValues`."""

    keys: Tensor
    values: Tensor
    cache_position: Tensor
    bias: Tensor
    """(rows, 1, 1, cache positions): 0 where a row may look, minus infinity elsewhere."""

    def attend(self, ops: ModelOps, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Writes this step's key and value, and attends to all that a row may look at."""
        keys, values, bias = self.keys, self.values, self.bias
        keys.index_copy_(2, self.cache_position, key.to(keys.dtype))
        values.index_copy_(2, self.cache_position, value.to(values.dtype))
        return ops.attention(query, keys, values, bias)


class QueryKeyValue(nn.Linear):
    """Queries, keys and values; the keys' bias stays as it is.

    It adds the same to all scores of a query, so its gradient is rounding alone, which Adam would
    scale up to whole steps.
    """

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        """Three products: a TPU copies the parts of one three times before its attention kernel."""
        query, key, value = self.bias.chunk(3)
        pairs = zip(self.weight.chunk(3), (query, key.detach(), value), strict=True)
        return tuple(F.linear(x, weight, bias) for weight, bias in pairs)


class GPT2Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, config: GPT2Config, ops: ModelOps) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.ops = ops
        self.exact_gelu = config.exact_gelu
        self.dropout = config.dropout
        self.norm_1 = nn.LayerNorm(width, eps=config.norm_eps)
        self.qkv = QueryKeyValue(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width, eps=config.norm_eps)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, each (rows, heads, length, width of a head)."""
        rows, length, width = x.shape
        parts = self.qkv(self.norm_1(x))
        if isinstance(parts, Tensor):  # LoRA's
            parts = parts.chunk(3, dim=-1)
        query, key, value = (
            part.reshape(rows, length, self.heads, width // self.heads).transpose(1, 2)
            for part in parts
        )
        return query, key, value

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """What follows attention, position by position: x and attended are (..., width)."""
        x = x + self._drop(self.attention_out(attended))
        hidden = self.mlp_in(self.norm_2(x))
        hidden = F.gelu(hidden, approximate="none" if self.exact_gelu else "tanh")
        return x + self._drop(self.mlp_out(hidden))

    def forward(
        self,
        x: Tensor,
        starts: Tensor | None = None,
        *,
        wanted: Tensor | None = None,
        past: LayerPast | None = None,
        keep_keys: bool = False,
    ) -> Any:
        """x (rows, length, width) after this block; with `wanted` at those positions only.

        With `keep_keys` also the keys and values, each (rows, heads, length, width of a head).
        """
        query, key, value = self.project(x)
        if past is None:
            attended = self.ops.attention(query, key, value, causal=True, starts=starts)
        else:
            attended = past.attend(self.ops, query, key, value)
        attended = _merge_heads(attended)
        if wanted is not None:
            x, attended = gather_positions(x, wanted), gather_positions(attended, wanted)
        x = self.finish(x, attended)
        return (x, key, value) if keep_keys else x

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class GPT2(nn.Module):
    """The model; its output projection is the token embedding."""

    def __init__(self, config: GPT2Config, ops: ModelOps) -> None:
        super().__init__()
        self.config = config
        self.ops = ops
        self.token_embedding = nn.Embedding(config.vocabulary_size, config.width)
        self.position_embedding = nn.Embedding(config.block_size, config.width)
        self.blocks = nn.ModuleList(GPT2Block(config, ops) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.apply(self._initialise)
        # Neighbouring positions start alike: a small set then learns sooner to copy by place.
        with torch.no_grad():
            self.position_embedding.weight.copy_(sinusoids(config.block_size, config.width))

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, GPT2Block):
            # Children come first: this scales what they drew, by depth, as in the paper.
            depth = math.sqrt(2 * self.config.layers)
            nn.init.normal_(module.mlp_out.weight, std=0.02 / depth)
            _attend_to_likes(module, depth)

    def forward(
        self,
        tokens: Tensor,
        wanted: Tensor | None = None,
        *,
        keep_keys: bool = False,
        past: KeyValues | None = None,
        positions: Tensor | None = None,
        starts: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """Logits of `tokens`, (rows, length) with positions from 0.

        wanted: (groups, count) indices into the flattened positions of each group of rows (rows
            are cut into `groups` equal runs); logits are then (groups, count, vocabulary), and what
            follows the last attention is computed there only. Without it: (rows, length,
            vocabulary).
        keep_keys: also returns keys and values, (layers, rows, heads, length, width of a head).
        past, positions: `tokens` (rows, 1) continue what `past` holds, at `positions` (rows, 1);
            the new keys and values are written into `past`.
        starts: (rows, length), where in its row each token's own sample begins: rows that hold
            several samples.
        """
        if past is not None:
            assert positions is not None
            return self._decode(tokens, past, positions)
        places = torch.arange(tokens.shape[1], device=tokens.device)[None]
        x = self._embed(tokens, places if starts is None else places - starts)
        if keep_keys:
            return self._prefill(x, wanted)
        *blocks, last = self.blocks
        inputs = () if starts is None else (starts,)
        for block in blocks:
            run = partial(self.ops.recompute, block) if self.config.recompute else block
            x = run(x, *inputs)
        return self._project(last(x, *inputs, wanted=wanted))

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x: Tensor = self.position_embedding(positions) + self.token_embedding(tokens)
        if self.config.dropout:
            x = F.dropout(x, self.config.dropout, self.training)
        return x

    def _project(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x), self.token_embedding.weight)

    def _prefill(self, x: Tensor, wanted: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        keys, values = [], []
        last = len(self.blocks) - 1
        for number, block in enumerate(self.blocks):
            x, key, value = block(x, wanted=wanted if number == last else None, keep_keys=True)
            keys.append(key)
            values.append(value)
        return self._project(x), torch.stack(keys), torch.stack(values)

    def _decode(self, tokens: Tensor, past: KeyValues, positions: Tensor) -> Tensor:
        x = self._embed(tokens, positions)
        zeros = torch.zeros(past.visible.shape, dtype=past.keys[0].dtype, device=x.device)
        bias = zeros.masked_fill(~past.visible, float("-inf"))[:, None, None, :]
        for block, keys, values in zip(self.blocks, past.keys, past.values, strict=True):
            layer = LayerPast(keys, values, past.cache_position, bias)
            x = block(x, past=layer)
        return self._project(x)


@torch.no_grad()
def _attend_to_likes(block: GPT2Block, depth: float) -> None:
    """Queries start as the keys, and a head gives back what it took in (Trockman and Kolter, 2023).

    A token then looks at tokens like it from the first step on: copying names is learned in
    hundreds of steps, where it took thousands.
    """
    width = block.qkv.in_features
    alike, value = torch.randn(2, width, width) / math.sqrt(width)
    block.qkv.weight.copy_(torch.cat([alike, alike, value]))
    block.attention_out.weight.copy_(value.T / depth)


def sinusoids(positions: int, width: int) -> Tensor:
    """(positions, width): sines and cosines (Vaswani et al., 2017) of standard deviation 0.02."""
    rates = torch.exp(-math.log(1e4) * torch.arange(0, width, 2) / width)
    angles = torch.arange(positions)[:, None] * rates
    waves = torch.stack([angles.sin(), angles.cos()], -1).flatten(1)
    return 0.02 * math.sqrt(2) * waves[:, :width]


def gather_positions(x: Tensor, wanted: Tensor) -> Tensor:
    """x (rows, length, width) at `wanted` (groups, count), counted within each group's rows."""
    groups, width = wanted.shape[0], x.shape[-1]
    grouped = x.reshape(groups, -1, width)
    return grouped.gather(1, wanted[..., None].expand(-1, -1, width))


def _merge_heads(x: Tensor) -> Tensor:
    rows, heads, length, width = x.shape
    return x.transpose(1, 2).reshape(rows, length, heads * width)
