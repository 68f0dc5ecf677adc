"""One lean decoder for all families of language models: the vocabulary is projected where a token
is wanted only.

One `forward` serves training, prefilling and decoding, so that any wrapper around the module
(DDP, FSDP, a compiler) serves all three.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tpukit.hardware.backend import ModelOps, TorchOps
from tpukit.tasks.summarize.model.rotary import frequencies, rotate

IGNORED = -100
"""Label of a place that is not a target."""
LARGEST_LOGITS = 2**28
"""Maximum elements of a device's logits in training; larger ones are made in blocks of places."""
MOST_BLOCKS = 32
"""Maximum number of blocks: each is a part of the graph and adds to the compile time."""
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
    "silu": F.silu,
}
"""Activations by their names in a transformers configuration."""


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder's shape; the defaults are GPT-2's (Radford et al., 2019)."""

    layers: int = 12
    heads: int = 12
    width: int = 768
    vocabulary_size: int = 50257
    block_size: int = 1024
    """Positions the model knows."""
    norm_eps: float = 1e-5
    dropout: float = 0.0
    recompute: bool = False
    """Blocks are computed again in the backward pass instead of being kept."""
    activation: str = "gelu_new"
    """nanoGPT trains with the exact GELU, OpenAI with the tanh approximation."""
    family: str = "gpt2"
    """The name of its table in `families`."""
    kv_heads: int | None = None
    """Heads of keys and values, each shared by a group of queries; None: as many as queries."""
    head_width: int | None = None
    """None: the width divided by the heads."""
    mlp_width: int | None = None
    """None: four times the width."""
    fused: bool = True
    """Query, key and value are one matrix, and so are the two inputs of a gated MLP."""
    gated: bool = False
    """The MLP multiplies its hidden layer by an activated one (SwiGLU, GeGLU)."""
    attention_bias: bool = True
    """Biases of query, key and value."""
    attention_out_bias: bool = True
    mlp_bias: bool = True
    rms_norm: bool = False
    """RMSNorm instead of layer norm."""
    norm_offset: bool = False
    """A norm multiplies by 1 + its weight (Gemma)."""
    norms: str = "before"
    """Place of a branch's norm: `before`, `after` or `both`."""
    qk_norm: str | None = None
    """Norm of queries and keys: of each `head`, or of `all` at once."""
    rope: Mapping[str, Any] | None = None
    """Rotary positions as in transformers' `rope_parameters`; None: learned positions."""
    window_rope: Mapping[str, Any] | None = None
    """Rotary positions of the layers with a window; None: the same."""
    unrotated: tuple[int, ...] = ()
    """Layers without rotary positions."""
    window: int | None = None
    """Tokens that a token sees, itself included, in the layers with a window."""
    windowed: tuple[int, ...] = ()
    """Layers with a window."""
    query_scale: float | None = None
    """Scores are divided by the root of this; None: of a head's width."""
    attention_cap: float | None = None
    """Scores are capped at this by a tanh."""
    logit_cap: float | None = None
    tied: bool = True
    """The output projection is the token embedding."""
    scaled_embedding: bool = False
    """Embeddings are multiplied by the root of the width."""
    source: Mapping[str, Any] | None = None
    """The transformers configuration that it was read from; None for GPT-2."""

    @classmethod
    def of(cls, recorded: Mapping[str, Any]) -> Self:
        """The configuration in a run's JSON, of an older version too."""
        values: dict[str, Any] = {
            name: tuple(v) if isinstance(v, list) else v for name, v in recorded.items()
        }
        if values.pop("exact_gelu", False):
            values["activation"] = "gelu"
        return cls(**values)

    @property
    def query_widths(self) -> tuple[int, int, int]:
        """Widths of all queries, of all keys and of all values of a token."""
        head = self.head_size
        values = (self.kv_heads or self.heads) * head
        return self.heads * head, values, values

    @property
    def head_size(self) -> int:
        return self.head_width or self.width // self.heads

    @property
    def mlp_size(self) -> int:
        return self.mlp_width or 4 * self.width


class KeyValues(NamedTuple):
    """The KV cache: keys and values of past tokens in a ring that all rows share.

    keys, values: for each layer (rows, heads, cache positions, width of a head). A token's position
    is in its input or in its key, so the order in the cache means nothing to attention: every
    row writes its next token into the same cache position, and `age` says which are its own.
    """

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    cache_position: Tensor
    """(1,): where this step's keys and values go."""
    visible: Tensor
    """(rows, cache positions): whether a row attends to a position, this step's included."""
    age: Tensor
    """(cache positions,): how many steps ago a position was written."""


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

    def add(self, key: Tensor, value: Tensor) -> None:
        """Writes this step's key and value."""
        self.keys.index_copy_(2, self.cache_position, key.to(self.keys.dtype))
        self.values.index_copy_(2, self.cache_position, value.to(self.values.dtype))


class ScaleNorm(nn.Module):
    """RMSNorm: x / root(mean(x^2) + eps) * weight, in float32 (Zhang and Sennrich, 2019)."""

    def __init__(self, width: int, eps: float, *, offset: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width) if offset else torch.ones(width))
        self.eps = eps
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        exact = x.float()
        weight = 1 + self.weight.float() if self.offset else self.weight.float()
        normed = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + self.eps)
        return (normed * weight).to(x.dtype)


class QueryKeyValue(nn.Linear):
    """Queries, keys and values; with learned positions the keys' bias stays as it is.

    It adds the same to all scores of a query, so its gradient is rounding alone, which Adam would
    scale up to whole steps.
    """

    weights_in_half = ("weight", "bias")

    def __init__(self, width: int, widths: tuple[int, int, int], *, bias: bool) -> None:
        super().__init__(width, sum(widths), bias=bias)
        self.widths = widths

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        """Three products: a TPU copies the parts of one three times before its attention kernel."""
        weights = torch.split_with_sizes(self.weight, self.widths)
        if self.bias is None:
            return tuple(F.linear(x, weight) for weight in weights)
        query, key, value = torch.split_with_sizes(self.bias, self.widths)
        pairs = zip(weights, (query, key.detach(), value), strict=True)
        return tuple(F.linear(x, weight, bias) for weight, bias in pairs)


class DecoderBlock(nn.Module):
    """Attention and MLP, each normed before it, after it, or both."""

    def __init__(self, config: DecoderConfig, number: int, ops: ModelOps) -> None:
        super().__init__()
        width, widths, mlp = config.width, config.query_widths, config.mlp_size
        self.config = config
        self.ops = ops
        self.rotates = config.rope is not None and number not in config.unrotated
        self.activate = ACTIVATIONS[config.activation]
        before, after = config.norms != "after", config.norms != "before"
        self.norm_1 = make_norm(config) if before else nn.Identity()
        if config.fused:
            self.qkv = QueryKeyValue(width, widths, bias=config.attention_bias)
        else:
            self.query, self.key, self.value = (
                nn.Linear(width, size, bias=config.attention_bias) for size in widths
            )
        self.attention_out = nn.Linear(widths[0], width, bias=config.attention_out_bias)
        self.norm_2 = make_norm(config) if before else nn.Identity()
        if config.gated and not config.fused:
            self.mlp_gate = nn.Linear(width, mlp, bias=config.mlp_bias)
        both = config.gated and config.fused
        self.mlp_in = nn.Linear(width, 2 * mlp if both else mlp, bias=config.mlp_bias)
        self.mlp_out = nn.Linear(mlp, width, bias=config.mlp_bias)
        self.after_1 = make_norm(config) if after else nn.Identity()
        self.after_2 = make_norm(config) if after else nn.Identity()
        if config.qk_norm:
            sizes = widths if config.qk_norm == "all" else [config.head_size] * 2
            self.query_norm, self.key_norm = (make_norm(config, size) for size in sizes[:2])

    def project(self, x: Tensor, waves: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, each (rows, heads, length, width of a head)."""
        config, (rows, length, _) = self.config, x.shape
        x = self.norm_1(x)
        parts = self.qkv(x) if config.fused else (self.query(x), self.key(x), self.value(x))
        if isinstance(parts, Tensor):  # LoRA's
            parts = torch.split_with_sizes(parts, config.query_widths, -1)
        query, key, value = parts
        if config.qk_norm == "all":
            query, key = self.query_norm(query), self.key_norm(key)
        query, key, value = (
            part.reshape(rows, length, -1, config.head_size).transpose(1, 2)
            for part in (query, key, value)
        )
        if config.qk_norm == "head":
            query, key = self.query_norm(query), self.key_norm(key)
        if waves is not None:
            query, key = rotate(query, waves), rotate(key, waves)
        if config.query_scale is not None:
            query = query * math.sqrt(config.head_size / config.query_scale)
        return query, key, value

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """What follows attention, position by position: x and attended are (..., width)."""
        x = x + self._drop(self.after_1(self.attention_out(attended)))
        return x + self._drop(self.after_2(self._mlp(self.norm_2(x))))

    def _mlp(self, x: Tensor) -> Tensor:
        hidden = self.mlp_in(x)
        if not self.config.gated:
            return self.mlp_out(self.activate(hidden))  # type: ignore[no-any-return]
        gate, hidden = hidden.chunk(2, -1) if self.config.fused else (self.mlp_gate(x), hidden)
        return self.mlp_out(self.activate(gate) * hidden)  # type: ignore[no-any-return]

    def forward(
        self,
        x: Tensor,
        *places: Tensor,
        wanted: Tensor | None = None,
        past: LayerPast | None = None,
        keep_keys: bool = False,
    ) -> Any:
        """x (rows, length, width) after this block; with `wanted` at those positions only.

        places: the waves of `rotate`, where this layer rotates, then the first position that each
        token attends to, (rows, length), where it is not the row's first.
        With `keep_keys` also the keys and values, each (rows, heads, length, width of a head).
        """
        waves, rest = (places[0], places[1:]) if self.rotates else (None, places)
        query, key, value = self.project(x, waves)
        if past is not None:
            past.add(key, value)
            attended = self._attend_past(query, past)
        else:
            attended = self._attend(query, key, value, *rest)
        attended = attended.transpose(1, 2).flatten(2)  # the heads beside one another
        if wanted is not None:
            x, attended = gather_positions(x, wanted), gather_positions(attended, wanted)
        x = self.finish(x, attended)
        return (x, key, value) if keep_keys else x

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, *starts: Tensor) -> Tensor:
        group = query.shape[1] // key.shape[1]
        if group > 1:
            key, value = (t.repeat_interleave(group, 1) for t in (key, value))
        if self.config.attention_cap:
            capped = partial(capped_attention, self.config.attention_cap, None)
            return self.ops.recompute(capped, query, key, value, *starts)
        return self.ops.attention(
            query, key, value, causal=True, starts=starts[0] if starts else None
        )

    def _attend_past(self, query: Tensor, past: LayerPast) -> Tensor:
        """The queries of a group are those of one head: their keys are not repeated."""
        rows, heads, _, width = query.shape
        grouped = query.reshape(rows, past.keys.shape[1], -1, width)
        if self.config.attention_cap:
            attended = capped_attention(
                self.config.attention_cap, past.bias, grouped, past.keys, past.values
            )
        else:
            attended = self.ops.attention(grouped, past.keys, past.values, past.bias)
        return attended.reshape(rows, heads, 1, width)

    def _drop(self, x: Tensor) -> Tensor:
        dropout = self.config.dropout
        return F.dropout(x, dropout, self.training) if dropout else x


class LanguageModel(nn.Module):
    """The decoder between a token embedding and the projection onto the vocabulary."""

    def __init__(self, config: DecoderConfig, ops: ModelOps) -> None:
        super().__init__()
        self.config = config
        self.ops = ops
        self.token_embedding = nn.Embedding(config.vocabulary_size, config.width)
        if config.rope is None:
            self.position_embedding = nn.Embedding(config.block_size, config.width)
        self.blocks = nn.ModuleList(DecoderBlock(config, n, ops) for n in range(config.layers))
        self.norm = make_norm(config)
        if not config.tied:
            self.head = nn.Linear(config.width, config.vocabulary_size, bias=False)
        self.add_frequencies()
        self.apply(self._initialise)
        if config.rope is None:
            # Neighbouring positions start alike: a small set then learns sooner to copy by place.
            with torch.no_grad():
                self.position_embedding.weight.copy_(sinusoids(config.block_size, config.width))

    def add_frequencies(self) -> None:
        """Computes the rotary frequencies: no checkpoint holds them."""
        ropes = {"frequencies": self.config.rope, "window_frequencies": self.config.window_rope}
        for name, rope in ropes.items():
            rates, scale = None, 1.0
            if rope is not None:
                width = int(self.config.head_size * rope.get("partial_rotary_factor", 1.0))
                rates, scale = frequencies(rope, width, self.config.block_size)
            self.register_buffer(name, rates, persistent=False)
            setattr(self, f"{name}_scale", scale)

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, DecoderBlock):
            # Children come first: this scales what they drew, by depth, as in the paper.
            depth = math.sqrt(2 * self.config.layers)
            nn.init.normal_(module.mlp_out.weight, std=0.02 / depth)
            if self.config.family == "gpt2":
                _attend_to_likes(module, depth)
            else:
                nn.init.normal_(module.attention_out.weight, std=0.02 / depth)

    def forward(
        self,
        tokens: Tensor,
        wanted: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        positions: Tensor | None = None,
        starts: Tensor | None = None,
        cache: Any = None,
    ) -> Tensor:
        """Logits of `tokens`, (rows, length) with positions from 0.

        wanted: (groups, count) indices into the flattened positions of each group of rows (rows
            are cut into `groups` equal runs); logits are then (groups, count, vocabulary), and what
            follows the last attention is computed there only. Without it: (rows, length,
            vocabulary).
        labels: (groups, count): returns the cross entropy of each instead, 0 where `IGNORED`.
        cache: a `Recorder` of keys and values, or a `Ring` that `tokens` (rows, 1) continue, at
            `positions` (rows, 1).
        starts: (rows, length), where in its row each token's own sample begins: rows that hold
            several samples.
        """
        if positions is not None:
            keys, values = zip(*cache.found.values(), strict=True)
            seen = cache.bias[:, 0, 0] == 0
            past = KeyValues(keys, values, cache.position, seen, cache.age)
            return self._decode(tokens, past, positions)
        places = torch.arange(tokens.shape[1], device=tokens.device)[None]
        of_sample = places if starts is None else places - starts
        x = self._embed(tokens, of_sample)
        inputs = self._inputs(of_sample, self._first_seen(tokens, starts))
        if cache is not None:
            logits, found_keys, found_values = self._prefill(x, inputs, wanted)
            for layer, pair in enumerate(zip(found_keys, found_values, strict=True)):
                cache.update(*pair, layer)
            return logits
        last = len(self.blocks) - 1
        for number, block in enumerate(self.blocks):
            if number == last:
                x = block(x, *inputs[number], wanted=wanted)
            else:
                run = partial(self.ops.recompute, block) if self.config.recompute else block
                x = run(x, *inputs[number])
        return self._project(x) if labels is None else self._losses(self.norm(x), labels)

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x: Tensor = self.token_embedding(tokens)
        if self.config.scaled_embedding:
            x = x * self.config.width**0.5
        if self.config.rope is None:
            x = self.position_embedding(positions) + x
        if self.config.dropout:
            x = F.dropout(x, self.config.dropout, self.training)
        return x

    def _first_seen(self, tokens: Tensor, starts: Tensor | None) -> tuple[Tensor | None, ...]:
        """The first position that each token attends to, without a window and within one."""
        window, length = self.config.window, tokens.shape[1]
        if not self.config.windowed or window is None or window >= length:
            return starts, starts
        first = (torch.arange(length, device=tokens.device) - window + 1).clamp(min=0)
        first = first.expand(tokens.shape[0], -1)
        return starts, first if starts is None else torch.maximum(first, starts)

    def _inputs(
        self, positions: Tensor, first_seen: Sequence[Tensor | None] = (None, None)
    ) -> list[list[Tensor]]:
        """What each layer is given beside x, see `DecoderBlock.forward`."""
        waves = self._waves("frequencies", positions)
        of_window = self._waves("window_frequencies", positions)
        if of_window is None:
            of_window = waves
        inputs = []
        for number in range(self.config.layers):
            has_window = number in self.config.windowed
            turns = of_window if has_window else waves
            first = first_seen[1] if has_window else first_seen[0]
            both = (None if number in self.config.unrotated else turns, first)
            inputs.append([part for part in both if part is not None])
        return inputs

    def _waves(self, name: str, positions: Tensor) -> Tensor | None:
        """(2, rows, length, pairs): cosines and sines of the positions (rows, length)."""
        rates: Tensor | None = getattr(self, name)
        if rates is None:
            return None
        angles = positions[..., None].float() * rates.float()
        scale: float = getattr(self, f"{name}_scale")
        return torch.stack([angles.cos(), angles.sin()]) * scale

    def _project(self, x: Tensor) -> Tensor:
        return self._logits(self.norm(x))

    def _logits(self, x: Tensor) -> Tensor:
        embedding = self.token_embedding if self.config.tied else self.head
        logits, cap = F.linear(x, embedding.weight), self.config.logit_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _losses(self, x: Tensor, labels: Tensor) -> Tensor:
        """Cross entropy of each place of x (groups, count, width), in blocks where all logits would
        be too large: those of a block are computed again in the backward pass."""
        blocks = math.ceil(labels.shape[1] * self.config.vocabulary_size / LARGEST_LOGITS)
        if blocks == 1:
            return self._losses_of_block(x, labels)
        blocks = min(4 * blocks, MOST_BLOCKS)
        parts = [
            self.ops.recompute(self._losses_of_block, *block)
            for block in zip(x.chunk(blocks, 1), labels.chunk(blocks, 1), strict=True)
        ]
        return torch.cat(parts, 1)

    def _losses_of_block(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self._logits(x).float().flatten(0, 1)
        losses = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="none")
        return losses.view(labels.shape)

    def _prefill(
        self, x: Tensor, inputs: list[list[Tensor]], wanted: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        keys, values = [], []
        last = len(self.blocks) - 1
        for number, block in enumerate(self.blocks):
            at = wanted if number == last else None
            x, key, value = block(x, *inputs[number], wanted=at, keep_keys=True)
            keys.append(key)
            values.append(value)
        return self._project(x), torch.stack(keys), torch.stack(values)

    def _decode(self, tokens: Tensor, past: KeyValues, positions: Tensor) -> Tensor:
        x = self._embed(tokens, positions)
        inputs = self._inputs(positions)
        zeros = torch.zeros(past.visible.shape, dtype=past.keys[0].dtype, device=x.device)
        bias = zeros.masked_fill(~past.visible, float("-inf"))[:, None, None, :]
        in_window = bias
        if self.config.windowed and self.config.window is not None:
            in_window = bias.masked_fill(past.age >= self.config.window, float("-inf"))
        for number, block in enumerate(self.blocks):
            layer = LayerPast(
                past.keys[number], past.values[number], past.cache_position,
                in_window if number in self.config.windowed else bias,
            )  # fmt: skip
            x = block(x, *inputs[number], past=layer)
        return self._project(x)


def make_norm(config: DecoderConfig, width: int | None = None) -> nn.Module:
    """A norm over `width`, by default the model's."""
    width = width or config.width
    if config.rms_norm:
        return ScaleNorm(width, config.norm_eps, offset=config.norm_offset)
    return nn.LayerNorm(width, eps=config.norm_eps)


def capped_attention(
    cap: float, bias: Tensor | None, query: Tensor, key: Tensor, value: Tensor, *starts: Tensor
) -> Tensor:
    """Attention whose scores are cap tanh(score / cap) (Gemma 2); causal without a bias."""
    scores = torch.matmul(query * query.shape[-1] ** -0.5, key.transpose(-2, -1)).float()
    scores = cap * torch.tanh(scores / cap)
    if bias is None:
        columns = torch.arange(key.shape[-2], device=key.device)
        scores = scores.masked_fill(columns > columns[:, None], float("-inf"))
    else:
        scores = scores + bias
    for first in starts:
        scores = scores.masked_fill(columns < first[:, None, :, None], float("-inf"))
    return torch.matmul(scores.softmax(-1).to(value.dtype), value)


@torch.no_grad()
def _attend_to_likes(block: DecoderBlock, depth: float) -> None:
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
