"""transformers' causal models in the engine's lean form.

Samples share rows, the hardware's own attention keeps them apart, and what follows the last
attention is computed where a token is wanted only. No family is named: what reaches into
transformers' modules are the forms at the end of this file, each tested beside the original.
"""

import inspect
import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes
from transformers import AttentionInterface, PreTrainedModel
from transformers.activations import NewGELUActivation
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from tpukit.errors import ConfigError
from tpukit.hardware.backend import ModelOps
from tpukit.tasks.hub.models import recompute_layer
from tpukit.tasks.llm.data.dataset import IGNORED

ATTENTION = "tpukit"
"""What a configuration calls `attention`."""
LARGEST_LOGITS = 2**28
"""Maximum elements of a device's logits in training; larger ones are made in blocks of places."""
MOST_BLOCKS = 32
"""Maximum number of blocks: each is a part of the graph and adds to the compile time."""


# -- attention -----------------------------------------------------------------------------------
def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    ops: ModelOps,
    starts: Tensor | None,
    past: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention as transformers' models call it: query (rows, heads, length, width) and the
    result (rows, length, heads, width).

    ops, starts, past: what `LanguageModel.forward` gives each layer, by names that no layer of
        transformers has; none has a default, so that one that a layer keeps to itself raises
        TypeError. A `past` with `attend` attends to what it holds.
    s_aux: (heads,), a score beside the keys' that takes its share of the probability.
    """
    if attention_mask is not None or (dropout and module.training):
        raise NotImplementedError("a mask of its own, or dropout on attention")
    # A norm whose weight is fp32 leaves queries and keys in fp32 beside values in bf16.
    query, key = query.to(value.dtype), key.to(value.dtype)
    default = query.shape[-1] ** -0.5
    if scaling is not None and scaling != default:
        query = query * (scaling / default)
    exactly = None
    if softcap or s_aux is not None:
        exactly = partial(exact_attention, softcap or None, s_aux)
    if hasattr(past, "attend"):
        return past.attend(query, key, value, ops, sliding_window, exactly), None
    length = query.shape[2]
    if sliding_window and sliding_window < length:
        first = (torch.arange(length, device=query.device) - sliding_window + 1).clamp(min=0)
        first = first.expand(query.shape[0], -1)
        starts = first if starts is None else torch.maximum(first, starts)
    group = query.shape[1] // key.shape[1]
    if group > 1:
        key, value = (part.repeat_interleave(group, 1) for part in (key, value))
    if exactly is not None:
        more = () if starts is None else (starts,)
        attended = ops.recompute(partial(exactly, None), query, key, value, *more)
    else:
        attended = ops.attention(query, key, value, causal=True, starts=starts)
    return attended.transpose(1, 2).contiguous(), None


def exact_attention(
    cap: float | None,
    sinks: Tensor | None,
    bias: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *starts: Tensor,
) -> Tensor:
    """Attention whose scores are cap tanh(score / cap) (Gemma 2), or have sinks beside them
    (gpt-oss); causal without a bias."""
    scores = torch.matmul(query * query.shape[-1] ** -0.5, key.transpose(-2, -1)).float()
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    if bias is None:
        columns = torch.arange(key.shape[-2], device=key.device)
        scores = scores.masked_fill(columns > columns[:, None], float("-inf"))
    else:
        scores = scores + bias
    for first in starts:
        scores = scores.masked_fill(columns < first[:, None, :, None], float("-inf"))
    if sinks is not None:
        beside = sinks.float().reshape(1, query.shape[1], -1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, beside], -1).softmax(-1)[..., :-1]
    else:
        scores = scores.softmax(-1)
    return torch.matmul(scores.to(value.dtype), value)


AttentionInterface.register(ATTENTION, attention)


# -- the model -----------------------------------------------------------------------------------
class LanguageModel(nn.Module):
    """A causal model of transformers, `lm`, that projects onto the vocabulary where a token is
    wanted only."""

    def __init__(
        self,
        lm: PreTrainedModel,
        ops: ModelOps,
        *,
        recompute: bool = False,
        last_at_wanted: bool = True,
        balances: bool = False,
    ) -> None:
        """recompute: layers are computed again in the backward pass instead of being kept.
        last_at_wanted: the last layer is computed where it is wanted, see `LastLayer`.
        balances: in training losses hold the auxiliary loss of experts too."""
        super().__init__()
        self.lm = lm
        self.ops = ops
        self.reference: LanguageModel | None = None
        """A frozen copy of the model as it was at the start, where preferences are learned."""
        self._is_own = lm.config._attn_implementation == ATTENTION
        self._base = base_of(lm)
        taken = inspect.signature(lm.get_submodule(self._base).forward).parameters
        self._cache_name = "cache" if "cache" in taken else "past_key_values"  # before 5.24
        if recompute:
            try:
                lm._set_gradient_checkpointing(True, partial(recompute_layer, ops))
            except ValueError as error:
                said = f"recompute: a {lm.config.model_type} of transformers has no layers for it."
                raise ConfigError(said, "Leave it out.") from error
        take_forms(lm)
        self._tail = Tail(lm.get_submodule(self._base))
        self._balances = balances
        self._last = LastLayer.of(lm) if last_at_wanted and not balances else None

    def forward(
        self,
        tokens: Tensor,
        wanted: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        starts: Tensor | None = None,
        positions: Tensor | None = None,
        cache: Any = None,
        at_start: bool = False,
    ) -> Tensor:
        """Logits of `tokens`, (rows, length) with positions from 0.

        wanted: (groups, count) indices into the flattened positions of each group of rows (rows
            are cut into `groups` equal runs); logits are then (groups, count, vocabulary), and what
            follows the last attention is computed there only. Without it: (rows, length,
            vocabulary).
        labels: (groups, count): returns the cross entropy of each instead, 0 where `IGNORED`.
        starts: (rows, length), where in its row each token's own sample begins: rows that hold
            several samples.
        positions: (rows, length), those of the tokens.
        cache: a `Cache` of transformers; its `attend`, if it has one, takes the place of
            `attention`.
        at_start: by the reference, if there is one: in this pass sharded weights are gathered.
        """
        if at_start and self.reference is not None:
            kept: Tensor = self.reference(tokens, wanted, labels=labels, starts=starts)
            return kept
        if positions is None:
            places = torch.arange(tokens.shape[1], device=tokens.device)[None]
            positions = places.expand(len(tokens), -1) if starts is None else places - starts
        given: dict[str, Any] = {}
        if self._is_own:  # transformers' attention takes rows of one sample alone
            given = {"starts": starts, "past": cache, "ops": self.ops, "position_ids": positions}
            given |= {} if cache is None else {self._cache_name: cache}
        x, routed = self._hidden(tokens, wanted, given)
        if labels is None:
            return self.logits(x)
        losses = self._losses(x, labels)
        if self._balances and self.training and starts is not None:
            # Their mean has it once.
            losses = losses + (labels != IGNORED) * self._imbalance(x, routed, starts)
        return losses

    def _hidden(
        self, tokens: Tensor, wanted: Tensor | None, given: dict[str, Any]
    ) -> tuple[Tensor, Any]:
        """What the vocabulary is projected from, (rows, length, width) or where it is wanted, and
        what chose the experts, if there are some."""
        if self._last is not None:
            self._last.wanted = wanted
        try:
            found = self.lm.get_submodule(self._base)(input_ids=tokens, **given, use_cache=False)
        finally:
            if self._last is not None:
                self._last.wanted = None
        self._tail.kind = type(found)
        x: Tensor = found.last_hidden_state
        if wanted is not None and self._last is None:
            x = gather_positions(x, wanted)
        elif wanted is not None:
            x = x.reshape(len(wanted), -1, x.shape[-1])[:, : wanted.shape[1]]
        return x, getattr(found, "router_logits", None)

    def logits(self, x: Tensor) -> Tensor:
        """Logits of hidden states (groups, count, width), scaled and capped as the model does."""
        none = torch.zeros(x.shape[:-1], dtype=torch.long, device=x.device)
        self._tail.given = x
        try:
            logits: Tensor = self.lm(input_ids=none, use_cache=False).logits
        finally:
            self._tail.given = None
        return logits

    def _imbalance(self, x: Tensor, routed: Any, starts: Tensor) -> Tensor:
        """What a causal model adds to its loss for experts that are chosen unevenly by the samples'
        tokens, `router_aux_loss_coef` within."""
        # What only fills a row begins where it is, and nothing that follows begins there.
        places = torch.arange(starts.shape[1], device=starts.device)
        inside = (starts != places) | (starts.roll(-1, 1) == places)
        ignored = torch.full((1, 1), IGNORED, device=x.device)
        self._tail.given, self._tail.routed = x[:1, :1], routed
        try:
            found = self.lm(
                input_ids=ignored, labels=ignored, num_items_in_batch=1, attention_mask=inside,
                use_cache=False,
            )  # fmt: skip
        finally:
            self._tail.given = self._tail.routed = None
        loss: Tensor = found.loss
        return loss

    def _losses(self, x: Tensor, labels: Tensor) -> Tensor:
        """Cross entropy of each place of x (groups, count, width), in blocks where all logits would
        be too large: those of a block are computed again in the backward pass."""
        vocabulary = self.lm.get_output_embeddings().weight.shape[0]
        blocks = math.ceil(labels.shape[1] * vocabulary / LARGEST_LOGITS)
        if blocks == 1:
            return self._losses_of_block(x, labels)
        blocks = min(4 * blocks, MOST_BLOCKS)
        parts = [
            self.ops.recompute(self._losses_of_block, *block)
            for block in zip(x.chunk(blocks, 1), labels.chunk(blocks, 1), strict=True)
        ]
        return torch.cat(parts, 1)

    def _losses_of_block(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.logits(x).float().flatten(0, 1)
        losses = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="none")
        return losses.view(labels.shape)


def base_of(lm: PreTrainedModel) -> str:
    """The name of the model whose hidden states a causal model projects onto the vocabulary.

    `base_model_prefix` does not name it in every release. Where a base only holds another, as in
    OPT and BART, the causal model calls the inner one itself.
    """
    found = [name for name, part in lm.named_children() if isinstance(part, PreTrainedModel)][:1]
    while True:
        outer = lm.get_submodule(".".join(found))
        held = {id(weight) for weight in outer.parameters()}
        inner = [
            name
            for name, part in outer.named_children()
            if isinstance(part, PreTrainedModel) and held == {id(p) for p in part.parameters()}
        ]
        if not inner:
            return ".".join(found)
        found += inner[:1]


def gather_positions(x: Tensor, wanted: Tensor) -> Tensor:
    """x (rows, length, width) at `wanted` (groups, count), counted within each group's rows."""
    groups, width = wanted.shape[0], x.shape[-1]
    grouped = x.reshape(groups, -1, width)
    return grouped.gather(1, wanted[..., None].expand(-1, -1, width))


class Tail:
    """What a causal model computes from its base's hidden states, on states that are given."""

    def __init__(self, base: nn.Module) -> None:
        self.kind: Any = None
        """The class of the base's results."""
        self.given: Tensor | None = None
        self.routed: Any = None
        """What chose the experts, where their loss is asked for."""
        self._whole = base.forward
        base.forward = self.forward

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """In place of the base's."""
        if self.given is None:
            return self._whole(*inputs, **named)
        routed = {} if self.routed is None else {"router_logits": self.routed}
        return self.kind(last_hidden_state=self.given, **routed)


class _AttentionReached(Exception):  # noqa: N818
    """A layer has computed what its attention takes."""


class LastLayer:
    """Makes a layer compute what follows its attention where it is wanted, whatever the family.

    The layer runs twice: up to its attention on all positions, then past it on the wanted ones.
    """

    def __init__(self, layer: nn.Module, attention: nn.Module) -> None:
        self.wanted: Tensor | None = None
        self._turn = ""
        self._seen: Any = None
        self._attended: Any = None
        self._layer, self._attention = layer.forward, attention.forward
        layer.forward, attention.forward = self.forward, self.attend

    @classmethod
    def of(cls, lm: nn.Module) -> Self | None:
        """The form of a model whose last layer has attention; None for others."""
        layers = [m for m in lm.modules() if isinstance(m, GradientCheckpointingLayer)]
        if not layers:
            return None
        layers[-1].gradient_checkpointing = False
        parts = (m for m in layers[-1].modules() if type(m).__name__.endswith("Attention"))
        attention = next(parts, None)
        return None if attention is None else cls(layers[-1], attention)

    def forward(self, x: Tensor, *inputs: Any, **named: Any) -> Any:
        """In place of the layer's."""
        if self.wanted is None:
            return self._layer(x, *inputs, **named)
        self._turn = "reach"
        try:  # noqa: SIM105 (Dynamo traces no `suppress`)
            self._layer(x, *inputs, **named)
        except _AttentionReached:
            pass
        attended_inputs, attended_named = self._seen
        attended, *rest = self._attention(*attended_inputs, **attended_named)
        self._attended = (gather_positions(attended, self.wanted), *rest)
        self._turn = "pass"
        try:
            found = self._layer(gather_positions(x, self.wanted), *inputs, **named)
        finally:
            self._turn, self._seen, self._attended = "", None, None
        if isinstance(found, tuple):
            return (as_rows(found[0], x.shape[1]), *found[1:])
        return as_rows(found, x.shape[1])

    def attend(self, *inputs: Any, **named: Any) -> Any:
        """In place of the attention's."""
        if self._turn == "reach":
            self._seen = (inputs, named)
            raise _AttentionReached
        return self._attended if self._turn == "pass" else self._attention(*inputs, **named)


def as_rows(x: Tensor, length: int) -> Tensor:
    """x (groups, count, width), filled up to rows of a length: some models view them as such."""
    missing = -x.shape[1] % length
    return F.pad(x, (0, 0, 0, missing)).reshape(-1, length, x.shape[-1])


# -- forms of transformers' modules --------------------------------------------------------------
class NoDropout(nn.Dropout):
    """Dropout of 0, for which XLA would draw a mask and keep it."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class TanhGELU(NewGELUActivation):  # type: ignore[misc]
    """The tanh approximation of GELU in one operation instead of eight."""

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")


class LinearConv1D(Conv1D):  # type: ignore[misc]
    """GPT-2's transposed linear layer, as the product that XLA's attention kernel takes."""

    weights_in_half = ("weight", "bias")

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.t(), self.bias)


class QueryKeyValue(LinearConv1D):
    """GPT-2's query, key and value by three products; the keys' bias stays as it is.

    It adds the same to all scores of a query, so its gradient is rounding alone, which Adam would
    scale up to whole steps.
    """

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.bias.chunk(3)
        pairs = zip(self.weight.chunk(3, 1), (query, key.detach(), value), strict=True)
        return torch.cat([F.linear(x, weight.t(), bias) for weight, bias in pairs], -1)


def take_forms(lm: nn.Module) -> None:
    """Gives a model's modules the forms that lose nothing and cost less; their names, weights and
    values stay."""
    for name, module in lm.named_modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None  # its token's gradient would be left out
        elif type(module) is nn.Dropout and module.p == 0:
            module.__class__ = NoDropout
        elif type(module) is Conv1D:
            module.__class__ = QueryKeyValue if name.endswith("c_attn") else LinearConv1D
        elif type(module) is NewGELUActivation:
            module.__class__ = TanhGELU
        elif "RMSNorm" in type(module).__name__:
            # Its weight in fp32 would make the result fp32.
            module.register_forward_hook(as_given)
    for file in {type(module).__module__ for module in lm.modules()}:
        theirs = getattr(sys.modules[file], "apply_rotary_pos_emb", None)
        if theirs is not None and rotates_by_halves(theirs):
            vars(sys.modules[file])["apply_rotary_pos_emb"] = rotate_by_halves


def as_given(_: nn.Module, inputs: tuple[Tensor, ...], result: Tensor) -> Tensor:
    """A result in the type of the input."""
    return result.to(inputs[0].dtype)


def rotate_by_halves(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Rotary positions of Llama's convention, in the type of queries and keys.

    query, key: (rows, heads, length, width); cos, sin: (rows, length, width), whose halves are
    equal; number i is paired with i + width / 2. Numbers beyond the width of these stay.
    """
    pairs = cos.shape[-1] // 2
    cosines, sines = (part[..., :pairs].unsqueeze(unsqueeze_dim) for part in (cos, sin))

    def turn(x: Tensor) -> Tensor:
        widths = [pairs, pairs, x.shape[-1] - 2 * pairs]
        first, second, rest = torch.split_with_sizes(x, widths, -1)
        turned = (first * cosines - second * sines, second * cosines + first * sines)
        return torch.cat([*(part.to(x.dtype) for part in turned), rest], -1)

    return turn(query), turn(key)


@_disable_current_modes()  # values, within a trace too
def rotates_by_halves(theirs: Callable[..., Any]) -> bool:
    """Whether a function of transformers turns queries and keys as `rotate_by_halves` does."""
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 2, 3, 8, generator=generator)
    waves = torch.randn(2, 1, 3, 4, generator=generator).repeat(1, 1, 1, 2)
    try:
        found = theirs(query, key, *waves)
    except Exception:  # another signature, or another shape
        return False
    own = rotate_by_halves(query, key, *waves)
    return all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, own, strict=True))
