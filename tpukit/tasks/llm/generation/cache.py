"""Caches that a model of transformers fills: of a prefill's keys, of all rows' past tokens."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from tpukit.hardware.backend import ModelOps


class KeyRecorder(Cache):  # type: ignore[misc]
    """Keeps the keys and values of a prefill as they come: (rows, heads, length, width)."""

    layers = ()

    def __init__(self) -> None:
        self.found: dict[int, tuple[Tensor, Tensor]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        self.found[layer_idx] = (key_states, value_states)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def tensors(self) -> list[Tensor]:
        """Keys and values of one layer after the other."""
        return [part for _, pair in sorted(self.found.items()) for part in pair]


class Ring(KeyRecorder):
    """Keys and values of past tokens in a ring that all rows share.

    A token's position is in its input or in its key, so the order in the ring means nothing to
    attention: every row writes its next token into the same place, and `age` says which are its
    own.
    """

    def __init__(
        self,
        found: Mapping[int, tuple[Tensor, Tensor]],
        position: Tensor,
        visible: Tensor,
        age: Tensor,
    ) -> None:
        """position: (1,), where this step's keys and values go. visible: (rows, positions), whether
        a row attends to a place, this step's included. age: (positions,), how many steps ago a
        place was written."""
        self.found = dict(found)
        self.position = position
        self.age = age
        zeros = torch.zeros(visible.shape, device=visible.device)
        self.bias = zeros.masked_fill(~visible, float("-inf"))[:, None, None, :]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = self.found[layer_idx]
        keys.index_copy_(2, self.position, key_states.to(keys.dtype))
        values.index_copy_(2, self.position, value_states.to(values.dtype))
        return keys, values

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        ops: ModelOps,
        window: int | None,
        exactly: Callable[..., Tensor] | None,
    ) -> Tensor:
        """Of one token a row, (rows, heads, 1, width), to the ring; (rows, 1, heads, width).

        window: tokens that a token sees, itself included. exactly: computes attention, of a bias,
        queries, keys and values, where the hardware's own is another.
        """
        bias = self.bias.to(query.dtype)
        if window and window < len(self.age):
            bias = bias.masked_fill(self.age >= window, float("-inf"))
        # The queries of a group are those of one head: their keys are not repeated.
        grouped = query.reshape(len(query), keys.shape[1], -1, query.shape[-1])
        if exactly is not None:
            attended = exactly(bias, grouped, keys, values)
        else:
            attended = ops.attention(grouped, keys, values, bias)
        return attended.reshape(len(query), 1, query.shape[1], -1)
