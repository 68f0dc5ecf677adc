"""Decoding of a batch of rows over a static KV cache; a free row takes the next prompt.

Where shapes are compiled each is fixed: the rows and positions of the cache, the rows and the
length of a prefill. The cache is a ring: in each step all rows write into the same cache position,
and a row sees the positions it wrote within its own length (see `KeyValues`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tpukit.hardware.backend import Backend
from tpukit.tasks.summarize.model.decoder import KeyValues, LanguageModel

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class CacheShape:
    """The fixed shapes of one decoding; `devices` are those of this rank."""

    rows: int
    positions: int
    devices: int

    @property
    def rows_per_device(self) -> int:
        return self.rows // self.devices


class BatchDecoder:
    """The KV cache of `shape.rows` rows and the model that fills it.

    Prompts come `shape.devices` at a time, one for each device's own rows; where shapes are free,
    as many as are worth it, in one packed row.
    """

    def __init__(self, model: LanguageModel, backend: Backend, shape: CacheShape) -> None:
        self.model = model
        self.backend = backend
        self.shape = shape
        self.lengths = np.zeros(shape.rows, np.int64)
        """Tokens of each row that are in the cache; 0 for a free row."""
        self.cache_position = 0
        self.packs = shape.devices == 1 and not backend.compiles_everything
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    @torch.no_grad()
    def prefill(
        self, prompts: Sequence[Array], rows: Sequence[Sequence[int]], length: int
    ) -> Tensor:
        """Puts each device's prompt into its rows; returns logits of the next token.

        prompts: one a device, or those of one row where `packs`; rows: for each, the rows of the
        cache that take it (none where a device has nothing to do and its prompt only fills the
        shape). length: the prefill's fixed length. Returns (prompts, vocabulary).
        """
        of_rows = [prompts] if self.packs else [[prompt] for prompt in prompts]
        tokens = np.zeros((len(of_rows), length), np.int64)
        starts, last = np.zeros_like(tokens), np.zeros((len(of_rows), len(of_rows[0])), np.int64)
        for row, inside in enumerate(of_rows):
            sizes = [len(prompt) for prompt in inside]
            ends = np.cumsum(sizes)
            tokens[row, : ends[-1]] = np.concatenate(inside)
            starts[row, : ends[-1]] = np.repeat(ends - sizes, sizes)
            last[row] = ends - 1
        host = {"tokens": tokens, "last": last} | ({"starts": starts} if self.packs else {})
        (batch,) = self.backend.batches([{n: torch.from_numpy(array) for n, array in host.items()}])
        with self.backend.autocast():
            logits, keys, values = self.model(
                batch["tokens"], batch["last"], keep_keys=True, starts=batch.get("starts")
            )
        self._insert(keys, values, prompts, rows)
        logits_a_prompt: Tensor = logits.flatten(0, 1).float()
        return logits_a_prompt

    @torch.no_grad()
    def decode(self, tokens: Tensor) -> Tensor:
        """Feeds one token to every row, (rows,); returns logits (rows, vocabulary)."""
        lengths = self._put(self.lengths)
        cache_position = self._put(np.array([self.cache_position], np.int64))
        cache_positions = torch.arange(self.shape.positions, device=self.backend.device)
        age = (cache_position - cache_positions).remainder(self.shape.positions)
        visible = age[None] <= lengths[:, None]
        positions = lengths.clamp(max=self.model.config.block_size - 1)[:, None]
        past = KeyValues(self._keys, self._values, cache_position, visible, age)
        with self.backend.autocast():
            logits: Tensor = self.model(tokens[:, None], past=past, positions=positions)
        self.cache_position = (self.cache_position + 1) % self.shape.positions
        self.lengths[self.lengths > 0] += 1
        return logits[:, 0].float()

    def release(self, rows: Sequence[int]) -> None:
        """These rows are free: they see nothing until a prompt is put into them."""
        self.lengths[list(rows)] = 0

    @torch.no_grad()
    def reorder(self, order: Array, differing: int) -> None:
        """Row i goes on with what row `order[i]` holds; they differ in the newest positions only,
        `differing` of them."""
        moved = np.flatnonzero(order != np.arange(self.shape.rows))
        if not len(moved):
            return
        self.lengths = self.lengths[order]
        if self.backend.compiles_everything:
            index = self._put(order)
            self._keys, self._values = (
                [t.index_select(0, index) for t in kept] for kept in (self._keys, self._values)
            )
            return
        into, source = self._put(moved), self._put(order[moved])
        for part in self._newest(differing):
            for tensor in (*self._keys, *self._values):
                newest = tensor[:, :, part]
                newest.index_copy_(0, into, newest.index_select(0, source))

    def _newest(self, count: int) -> list[slice]:
        """The newest positions of the ring, the oldest of them first."""
        start = (self.cache_position - count) % self.shape.positions
        wrapped = max(0, start + count - self.shape.positions)
        return [slice(start, start + count), slice(wrapped)]

    @torch.no_grad()
    def keep(self, rows: Array, positions: int) -> None:
        """Goes on with these rows alone, over a ring of `positions` that holds all they see.

        The new ring begins with the oldest position that these rows see.
        """
        lengths = self.lengths[rows]
        # The newest positions come first to last: the ring starts anew after them.
        seen = min(int(lengths.max()), positions)
        parts = self._newest(seen)
        kept_rows = self._put(rows)
        self.shape = replace(self.shape, rows=len(rows), positions=positions)
        rest = self._empty(self._keys[0])[:, :, seen:]
        for tensors in (self._keys, self._values):
            for layer, tensor in enumerate(tensors):
                kept = tensor.index_select(0, kept_rows)
                tensors[layer] = torch.cat([*(kept[:, :, part] for part in parts), rest], 2)
        self.lengths, self.cache_position = lengths, seen % positions

    def _put(self, array: Array) -> Tensor:
        return torch.from_numpy(array.copy()).to(self.backend.device)

    def _insert(
        self, keys: Tensor, values: Tensor, prompts: Sequence[Array], rows: Sequence[Sequence[int]]
    ) -> None:
        """Writes the prompts so that their last token is in the position before the next one."""
        if not self._keys:
            self._keys = [self._empty(layer) for layer in keys]
            self._values = [self._empty(layer) for layer in values]
            self.cache_position = max(map(len, prompts)) % self.shape.positions
        starts = np.array([self.cache_position - len(prompt) for prompt in prompts], np.int64)
        write = self._write_everywhere if self.shape.devices > 1 else self._write_rows
        write = self._copy_rows if self.packs else write
        write(self._keys, keys, starts, rows)
        write(self._values, values, starts, rows)
        for prompt, taken in zip(prompts, rows, strict=True):
            self.lengths[list(taken)] = len(prompt)

    def _empty(self, layer: Tensor) -> Tensor:
        _, heads, _, width = layer.shape
        shape = (self.shape.rows, heads, self.shape.positions, width)
        return torch.zeros(shape, dtype=layer.dtype, device=self.backend.device)

    def _copy_rows(
        self, cache: list[Tensor], new: Tensor, starts: Array, rows: Sequence[Sequence[int]]
    ) -> None:
        """One device, whose prompts stand in one row; each goes into rows of the cache (one after
        the other), into a run of positions, or two."""
        at = 0
        for length, taken in zip((self.cache_position - starts).tolist(), rows, strict=True):
            older, newer = self._newest(length)
            for layer, tensor in enumerate(cache):
                first, second = (
                    tensor[taken[0] : taken[-1] + 1, :, part] for part in (older, newer)
                )
                middle = at + first.shape[2]
                first.copy_(new[layer][:, :, at:middle])
                second.copy_(new[layer][:, :, middle : at + length])
            at += length

    def _write_rows(
        self, cache: list[Tensor], new: Tensor, starts: Array, rows: Sequence[Sequence[int]]
    ) -> None:
        """One device: writes the prompt's positions of its rows, and touches nothing else."""
        if not rows[0]:
            return
        positions = (starts[0] + np.arange(new.shape[3])) % self.shape.positions
        index, places = self._put(np.array(rows[0], np.int64)), self._put(positions)
        for layer, tensor in enumerate(cache):
            prompt = new[layer].transpose(1, 2).expand(len(rows[0]), -1, -1, -1)
            tensor.transpose(1, 2).index_put_((index[:, None], places[None]), prompt)

    def _write_everywhere(
        self, cache: list[Tensor], new: Tensor, starts: Array, rows: Sequence[Sequence[int]]
    ) -> None:
        """Several devices behind one tensor: chosen element by element, so that no row's part
        has to be known to another device."""
        devices, own = self.shape.devices, self.shape.rows_per_device
        length = new.shape[3]
        source = (np.arange(self.shape.positions)[None] - starts[:, None]) % self.shape.positions
        taken = np.zeros((devices, own), bool)
        for device, chosen in enumerate(rows):
            taken[device, [row - device * own for row in chosen]] = True
        replaced = taken[:, :, None] & (source < length)[:, None, :]
        place = self._put(np.minimum(source, length - 1))[:, None, :, None]
        mask = self._put(replaced.reshape(self.shape.rows, 1, -1, 1))
        for layer, tensor in enumerate(cache):
            prompts = new[layer]
            spread = prompts.gather(2, place.expand(-1, prompts.shape[1], -1, prompts.shape[3]))
            spread = spread[:, None].expand(-1, own, -1, -1, -1).reshape(tensor.shape)
            cache[layer] = torch.where(mask, spread, tensor)
