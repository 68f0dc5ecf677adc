"""Slots: rows decoded side by side over a static cache; a free one takes the next prompt.

Every shape is fixed but by `keep`: the number of slots, the columns of the cache, the rows and the
length of a prefill. The cache is a ring: in each step all slots write into the same column, and a
slot sees the columns it wrote within its own length (see `KeyValues`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tpukit.hardware.backend import Backend
from tpukit.tasks.summarize.model.gpt2 import GPT2, KeyValues

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class SlotShape:
    """The fixed shapes of one decoding; `devices` are those of this process."""

    slots: int
    columns: int
    devices: int

    @property
    def slots_per_device(self) -> int:
        return self.slots // self.devices


class Slots:
    """The cache of `shape.slots` rows and the model that fills it.

    Prompts come `shape.devices` at a time, one for each device's own slots.
    """

    def __init__(self, model: GPT2, backend: Backend, shape: SlotShape) -> None:
        self.model = model
        self.backend = backend
        self.shape = shape
        self.lengths = np.zeros(shape.slots, np.int64)
        """Tokens of each slot that are in the cache."""
        self.column = 0
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    @torch.no_grad()
    def prefill(
        self, prompts: Sequence[Array], slots: Sequence[Sequence[int]], length: int
    ) -> Tensor:
        """Puts each device's prompt into its slots; returns logits of the next token.

        prompts: one a device; slots: for each, the slots that take it (none where a device has
        nothing to do and its prompt only fills the shape). length: the prefill's fixed length.
        Returns (devices, vocabulary).
        """
        tokens = np.zeros((len(prompts), length), np.int64)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = prompt
        last = np.array([[len(prompt) - 1] for prompt in prompts], np.int64)
        batch = next(
            iter(
                self.backend.batches(
                    [{"tokens": torch.from_numpy(tokens), "last": torch.from_numpy(last)}]
                )
            )
        )
        with self.backend.autocast():
            logits, keys, values = self.model(batch["tokens"], batch["last"], keep_keys=True)
        self._insert(keys, values, prompts, slots)
        logits_a_row: Tensor = logits[:, 0].float()
        return logits_a_row

    @torch.no_grad()
    def decode(self, tokens: Tensor) -> Tensor:
        """Feeds one token to every slot, (slots,); returns logits (slots, vocabulary)."""
        lengths = self._put(self.lengths)
        column = self._put(np.array([self.column], np.int64))
        columns = torch.arange(self.shape.columns, device=self.backend.device)
        visible = (column - columns).remainder(self.shape.columns)[None] <= lengths[:, None]
        positions = lengths.clamp(max=self.model.config.block_size - 1)[:, None]
        past = KeyValues(self._keys, self._values, column, visible)
        with self.backend.autocast():
            logits: Tensor = self.model(tokens[:, None], past=past, positions=positions)
        self.column = (self.column + 1) % self.shape.columns
        self.lengths += 1
        return logits[:, 0].float()

    @torch.no_grad()
    def reorder(self, order: Array) -> None:
        """Slot i goes on with what slot `order[i]` holds."""
        if (order == np.arange(self.shape.slots)).all():
            return
        index = self._put(order)
        for tensors in (self._keys, self._values):
            for layer, tensor in enumerate(tensors):
                tensors[layer] = tensor.index_select(0, index)
        self.lengths = self.lengths[order]

    @torch.no_grad()
    def keep(self, slots: Array, columns: int) -> None:
        """Goes on with these slots alone, over a ring of `columns` that holds all they see."""
        lengths = self.lengths[slots]
        # The newest columns come first to last: the ring starts anew after them.
        seen = min(int(lengths.max()), columns)
        newest = self._put((self.column - seen + np.arange(seen)) % self.shape.columns)
        rows = self._put(slots)
        self.shape = replace(self.shape, slots=len(slots), columns=columns)
        for tensors in (self._keys, self._values):
            for layer, tensor in enumerate(tensors):
                tensors[layer] = self._empty(tensor)
                kept = tensor.index_select(0, rows).index_select(2, newest)
                tensors[layer][:, :, :seen] = kept
        self.lengths, self.column = lengths, seen % columns

    def _put(self, array: Array) -> Tensor:
        return torch.from_numpy(array.copy()).to(self.backend.device)

    def _insert(
        self, keys: Tensor, values: Tensor, prompts: Sequence[Array], slots: Sequence[Sequence[int]]
    ) -> None:
        """Writes the prompts so that their last token is in the column before the next one."""
        if not self._keys:
            self._keys = [self._empty(layer) for layer in keys]
            self._values = [self._empty(layer) for layer in values]
        starts = np.array([self.column - len(prompt) for prompt in prompts], np.int64)
        write = self._write_rows if self.shape.devices == 1 else self._write_everywhere
        write(self._keys, keys, starts, slots)
        write(self._values, values, starts, slots)
        for prompt, taken in zip(prompts, slots, strict=True):
            self.lengths[list(taken)] = len(prompt)

    def _empty(self, layer: Tensor) -> Tensor:
        _, heads, _, width = layer.shape
        shape = (self.shape.slots, heads, self.shape.columns, width)
        return torch.zeros(shape, dtype=layer.dtype, device=self.backend.device)

    def _write_rows(
        self, cache: list[Tensor], new: Tensor, starts: Array, slots: Sequence[Sequence[int]]
    ) -> None:
        """One device: writes the prompt's columns of its slots, and touches nothing else."""
        if not slots[0]:
            return
        columns = (starts[0] + np.arange(new.shape[3])) % self.shape.columns
        rows, places = self._put(np.array(slots[0], np.int64)), self._put(columns)
        for layer, tensor in enumerate(cache):
            prompt = new[layer].transpose(1, 2).expand(len(slots[0]), -1, -1, -1)
            tensor.transpose(1, 2).index_put_((rows[:, None], places[None]), prompt)

    def _write_everywhere(
        self, cache: list[Tensor], new: Tensor, starts: Array, slots: Sequence[Sequence[int]]
    ) -> None:
        """Several devices behind one tensor: chosen element by element, so that no slot's part
        has to be known to another device."""
        devices, own = self.shape.devices, self.shape.slots_per_device
        length = new.shape[3]
        source = (np.arange(self.shape.columns)[None] - starts[:, None]) % self.shape.columns
        taken = np.zeros((devices, own), bool)
        for device, chosen in enumerate(slots):
            taken[device, [slot - device * own for slot in chosen]] = True
        replaced = taken[:, :, None] & (source < length)[:, None, :]
        place = self._put(np.minimum(source, length - 1))[:, None, :, None]
        mask = self._put(replaced.reshape(self.shape.slots, 1, -1, 1))
        for layer, tensor in enumerate(cache):
            rows = new[layer]
            spread = rows.gather(2, place.expand(-1, rows.shape[1], -1, rows.shape[3]))
            spread = spread[:, None].expand(-1, own, -1, -1, -1).reshape(tensor.shape)
            cache[layer] = torch.where(mask, spread, tensor)
