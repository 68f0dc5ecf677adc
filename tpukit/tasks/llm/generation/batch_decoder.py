"""Decoding of a batch of rows over a static KV cache; a free row takes the next prompt.

Where shapes are compiled each is fixed: the rows and positions of the cache, the rows and the
length of a prefill. The cache is a ring: in each step all rows write into the same cache position,
and a row sees the positions it wrote within its own length (`cache.Ring`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tpukit.hardware.backend import Backend, Batch
from tpukit.tasks.llm.generation.cache import KeyRecorder, Ring

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


Choose = Callable[[Tensor, Tensor | None, Tensor | None], Any]
"""From logits (rows, vocabulary), the tokens before them (rows, length), where they are kept and in
any order, and what the choice takes beside them to one tensor or several."""


@dataclass(frozen=True)
class Stored:
    """What one layer keeps of a token: its keys or its values."""

    layer: int
    heads: int
    width: int
    dtype: torch.dtype


def stored(model: nn.Module, backend: Backend, devices: int) -> list[Stored]:
    """What a cache holds, found by a token: keys, then values, of one layer after the other."""
    recorder = KeyRecorder()
    (batch,) = backend.batches([{"tokens": torch.zeros((devices, 1), dtype=torch.long)}])
    with torch.no_grad(), backend.autocast():
        model(batch["tokens"], cache=recorder)
    # Norms may leave keys in another type than attention takes.
    return [
        Stored(layer, part.shape[1], part.shape[3], pair[1].dtype)
        for layer, pair in sorted(recorder.found.items())
        for part in pair
    ]


class BatchDecoder:
    """The KV cache of `shape.rows` rows and the model that fills it.

    Prompts come `shape.devices` at a time, one for each device's own rows; where shapes are free,
    as many as are worth it, in one packed row. A prefill and a step are one program each, their
    choice of tokens included, where the hardware has programs.
    """

    def __init__(
        self,
        model: nn.Module,
        backend: Backend,
        shape: CacheShape,
        kinds: Sequence[Stored],
        choose: Choose,
        *,
        block_size: int,
        keeps_tokens: bool,
    ) -> None:
        """kinds: what `stored` found. block_size: positions that the model knows. keeps_tokens:
        whether `choose` takes the tokens of the rows, which are kept as a further layer then."""
        self.model = model
        self.backend = backend
        self.shape = shape
        self.choose = choose
        self.block_size = block_size
        self.kinds = [*kinds, Stored(len(kinds), 1, 1, torch.long)] if keeps_tokens else kinds
        self.keeps_tokens = keeps_tokens
        self.packs = shape.devices == 1 and not backend.compiles_everything
        self._ring = self._zeros(shape.positions)
        self.restart()

    def restart(self) -> None:
        """All rows are free: what the cache holds is seen by none."""
        self.lengths = np.zeros(self.shape.rows, np.int64)
        """Tokens of each row that are in the cache; 0 for a free row."""
        self.cache_position = 0
        self._order: Array | None = None
        """The rows that the next step's go on from, where that is part of its program."""

    @torch.no_grad()
    def prefill(
        self,
        prompts: Sequence[Array],
        rows: Sequence[Sequence[int]],
        length: int,
        given: Array | None = None,
    ) -> Any:
        """Puts each device's prompt into its rows; returns the choice of the next tokens.

        prompts: one a device, or those of one row where `packs`; rows: for each, the rows of the
        cache that take it (none where a device has nothing to do and its prompt only fills the
        shape). length: the prefill's fixed length.
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
        if self.keeps_tokens:
            host["before"] = np.array([np.resize(prompt, length) for prompt in prompts])
        (batch,) = self.backend.batches([{n: torch.from_numpy(array) for n, array in host.items()}])
        batch |= self._places(prompts, rows, length) | self._given(given)
        chosen = self.backend.run(self._prefill, [batch], 0.0)
        for prompt, taken in zip(prompts, rows, strict=True):
            self.lengths[list(taken)] = len(prompt)
        return chosen

    def _prefill(self, batches: Sequence[Batch], _: float | Tensor) -> Any:
        [batch] = batches
        tokens, recorder = batch["tokens"], KeyRecorder()
        with self.backend.autocast():
            logits = self.model(tokens, batch["last"], starts=batch.get("starts"), cache=recorder)
        kept = [tokens[:, None, :, None]] if self.keeps_tokens else []
        self._write([*recorder.tensors(), *kept], batch)
        return self.choose(logits.flatten(0, 1).float(), batch.get("before"), batch.get("given"))

    @torch.no_grad()
    def decode(self, tokens: Tensor, given: Array | None = None) -> Any:
        """Feeds one token to every row, (rows,); returns the choice of the next tokens."""
        batch = {
            "tokens": tokens,
            "lengths": self._put(self.lengths),
            "cache_position": self._put(np.array([self.cache_position], np.int64)),
            **self._given(given),
        }
        if self._order is not None:
            batch["order"] = self._put(self._order)
            self._order = np.arange(self.shape.rows)
        chosen = self.backend.run(self._decode, [batch], 0.0)
        self.cache_position = (self.cache_position + 1) % self.shape.positions
        self.lengths[self.lengths > 0] += 1
        return chosen

    def _decode(self, batches: Sequence[Batch], _: float | Tensor) -> Any:
        [batch] = batches
        if "order" in batch:
            for tensor in self._ring:
                tensor.copy_(tensor.index_select(0, batch["order"]))
        tokens, lengths, cache_position = (
            batch[name] for name in ("tokens", "lengths", "cache_position")
        )
        cache_positions = torch.arange(self.shape.positions, device=lengths.device)
        age = (cache_position - cache_positions).remainder(self.shape.positions)
        visible = age[None] <= lengths[:, None]
        positions = lengths.clamp(max=self.block_size - 1)[:, None]
        layers = (kind.layer for kind in self.kinds[::2])
        pairs = zip(self._ring[::2], self._ring[1::2], strict=False)
        past = Ring(dict(zip(layers, pairs, strict=False)), cache_position, visible, age)
        with self.backend.autocast():
            logits: Tensor = self.model(tokens[:, None], positions=positions, cache=past)
        before = None
        if self.keeps_tokens:
            kept = self._ring[-1]
            kept.index_copy_(2, cache_position, tokens[:, None, None, None])
            before = torch.where(visible, kept[:, 0, :, 0], tokens[:, None])
        return self.choose(logits[:, 0].float(), before, batch.get("given"))

    def release(self, rows: Sequence[int]) -> None:
        """These rows are free: they see nothing until a prompt is put into them."""
        self.lengths[list(rows)] = 0

    @torch.no_grad()
    def reorder(self, order: Array, differing: int) -> None:
        """Row i goes on with what row `order[i]` holds; they differ in the newest positions only,
        `differing` of them."""
        self.lengths = self.lengths[order]
        if self.backend.compiles_everything:
            self._order = order if self._order is None else self._order[order]
            return
        moved = np.flatnonzero(order != np.arange(self.shape.rows))
        if not len(moved):
            return
        into, source = self._put(moved), self._put(order[moved])
        for part in self._newest(differing):
            for tensor in self._ring:
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
        for place, rest in enumerate(self._zeros(positions - seen)):
            kept = self._ring[place].index_select(0, kept_rows)
            self._ring[place] = torch.cat([*(kept[:, :, part] for part in parts), rest], 2)
        self.lengths, self.cache_position = lengths, seen % positions

    def _put(self, array: Array) -> Tensor:
        return torch.from_numpy(array.copy()).to(self.backend.device)

    def _given(self, array: Array | None) -> dict[str, Tensor]:
        return {} if array is None else {"given": self._put(array)}

    def _zeros(self, positions: int) -> list[Tensor]:
        """Room for a number of positions of every row: (rows, heads, positions, width) each, laid
        out over the devices as batches are."""
        (batch,) = self.backend.batches([{"row": torch.zeros((self.shape.rows, 1, 1, 1))}])
        row = batch["row"]
        made = [
            row.to(kind.dtype).expand(-1, kind.heads, positions, kind.width).clone()
            for kind in self.kinds
        ]
        self.backend.finish()
        return made

    # -- writing prompts: their last token goes into the position before the next one --------------
    def _places(
        self, prompts: Sequence[Array], rows: Sequence[Sequence[int]], length: int
    ) -> dict[str, Tensor]:
        """Where in the cache prompts go, as `_write` takes it."""
        starts = np.array([self.cache_position - len(prompt) for prompt in prompts], np.int64)
        if self.shape.devices > 1:
            return self._masks(starts, rows, length)
        sizes = [len(prompt) for prompt in prompts] if self.packs else [length]
        found = []
        for start, taken, size, end in zip(starts, rows, sizes, np.cumsum(sizes), strict=True):
            row, source = np.meshgrid(taken, np.arange(size), indexing="ij")
            found.append([row, (start + source) % self.shape.positions, source + end - size])
        places = (
            np.concatenate([part.ravel() for part in parts]) for parts in zip(*found, strict=True)
        )
        return dict(zip(("rows", "positions", "sources"), map(self._put, places), strict=True))

    def _write(self, new: Sequence[Tensor], batch: Batch) -> None:
        write = self._write_everywhere if self.shape.devices > 1 else self._write_rows
        write(new, batch)

    def _write_rows(self, new: Sequence[Tensor], batch: Batch) -> None:
        """One device: writes the prompts' positions of their rows, and touches nothing else."""
        index = (batch["rows"], batch["positions"])
        for tensor, made in zip(self._ring, new, strict=True):
            prompt = made[0].transpose(0, 1).index_select(0, batch["sources"])
            tensor.transpose(1, 2).index_put_(index, prompt.to(tensor.dtype))

    def _masks(
        self, starts: Array, rows: Sequence[Sequence[int]], length: int
    ) -> dict[str, Tensor]:
        devices, own = self.shape.devices, self.shape.rows_per_device
        source = (np.arange(self.shape.positions)[None] - starts[:, None]) % self.shape.positions
        taken = np.zeros((devices, own), bool)
        for device, chosen in enumerate(rows):
            taken[device, [row - device * own for row in chosen]] = True
        replaced = taken[:, :, None] & (source < length)[:, None, :]
        return {
            "sources": self._put(np.minimum(source, length - 1)[:, None, :, None]),
            "replaced": self._put(replaced.reshape(self.shape.rows, 1, -1, 1)),
        }

    def _write_everywhere(self, new: Sequence[Tensor], batch: Batch) -> None:
        """Several devices behind one tensor: chosen element by element, so that no row's part
        has to be known to another device."""
        own, sources = self.shape.rows_per_device, batch["sources"]
        for tensor, made in zip(self._ring, new, strict=True):
            spread = made.gather(2, sources.expand(-1, made.shape[1], -1, made.shape[3]))
            spread = spread[:, None].expand(-1, own, -1, -1, -1).reshape(tensor.shape)
            tensor.copy_(torch.where(batch["replaced"], spread.to(tensor.dtype), tensor))
