"""Which samples make up an optimizer step: plans, micro-batches, keyed draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from tpukit.hardware.backend import Batch
from tpukit.train.data.shared_memory import lack_of_room_named
from tpukit.train.mistakes.returned import why_not_stacked

Sample = Mapping[str, Any]
"""A dict of arrays (or numbers) of fixed shapes."""


class SampleKey(NamedTuple):
    """Which sample, and in which pass over the data: together they seed its own draws."""

    epoch: int
    sample: int


VALIDATION_EPOCH = 2**31 - 1
"""The epoch of every validation sample: its draws are the same each time."""
FIRST_SAMPLE = SampleKey(VALIDATION_EPOCH, 0)


@dataclass(frozen=True)
class MicroBatch:
    """The samples of one forward and backward pass, over all ranks until `share` cuts it."""

    keys: tuple[SampleKey, ...]
    rows: int
    """Rows of the batch; those beyond `keys` are filled and masked."""
    shape: Any = None
    """The task's own description of the batch's fixed shape; None where all have the same."""
    samples: Any = None
    """The samples, where they were read from a stream; None: they are found by their keys."""
    counts: tuple[int, ...] | None = None
    """How many samples each row holds, where they are packed; None: one each."""
    filler: SampleKey = FIRST_SAMPLE
    """The sample, masked, of a share that has none of its own."""

    def share(self, rank: int, world_size: int) -> MicroBatch:
        """The part of one rank: an equal number of rows, its keys a contiguous run."""
        rows = self.rows // world_size
        own = slice(rank * rows, (rank + 1) * rows)
        counts = None if self.counts is None else self.counts[own]
        if self.counts is not None:
            before = sum(self.counts[: own.start])
            own = slice(before, before + sum(self.counts[own]))
        keys, filler = self.keys[own], self.keys[0] if self.keys else self.filler
        # A share without samples fills its rows with one of this shape.
        samples = None if self.samples is None else self.samples[own] or self.samples[:1]
        return MicroBatch(keys, rows, self.shape, samples, counts, filler)

    def without_filled_rows(self, devices: int) -> list[MicroBatch]:
        """The same samples where each device's rows are all samples, or none: in two parts where
        they do not divide."""
        if self.counts is not None:
            return [self]
        rest = len(self.keys) % devices
        even, odd = self.keys[: len(self.keys) - rest], self.keys[len(self.keys) - rest :]
        parts = ((even, len(even)), (odd, devices))
        return [replace(self, keys=keys, rows=rows) for keys, rows in parts if keys]


class SampleSource(Protocol):
    """A map-style dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Sample: ...


class BatchPlan(Protocol):
    """What decides a run's data: a pure function of the step."""

    def steps_per_epoch(self) -> int:
        """Optimizer steps in one pass over the data, rounded up."""
        ...

    def step(self, step: int) -> Sequence[MicroBatch]:
        """The micro-batches of optimizer step `step` (from 0), whatever the world size."""
        ...


@dataclass(frozen=True)
class PlanSettings:
    """What a plan of training batches is made from."""

    global_batch_size: int
    micro_rows: int
    """Rows of one micro-batch over all ranks."""
    devices: int
    """Rows are split over these: every micro-batch's rows are a multiple of it."""
    seed: int
    compiles: bool = False
    """Whether training compiles a program for each shape of its batches."""

    @property
    def fixed_shapes(self) -> bool:
        """The earlier name of `compiles`, for tasks that read it."""
        return self.compiles


def stack_samples(samples: Sequence[Sample], rows: int) -> Batch:
    """Samples stacked along a first axis, repeated in turn to fill `rows`, plus `mask`.

    Raises ValueError naming the entry in which two samples differ.
    """
    filled = [dict(samples[row % len(samples)]) for row in range(max(rows, len(samples)))]
    try:
        # In a DataLoader worker it stacks straight into shared memory.
        with lack_of_room_named():
            batch: Batch = default_collate(filled)
    except (KeyError, RuntimeError, TypeError) as error:
        raise ValueError(why_not_stacked(samples)) from error
    return {**batch, "mask": _mask(len(samples), rows)}


def fill_rows(batch: Batch, used: int, rows: int) -> Batch:
    """A batch of `used` rows with these repeated in turn to fill `rows`, plus `mask`.

    Entries with another number of rows stay as they are, and so does a mask of `rows`.
    """
    turns = torch.arange(rows) % used
    filled = {
        name: tensor[turns] if used < rows and tensor.shape[:1] == (used,) else tensor
        for name, tensor in batch.items()
    }
    if "mask" not in batch:
        filled["mask"] = _mask(used, rows)
    elif batch["mask"].shape == (used,):
        filled["mask"] = filled["mask"] * _mask(used, rows)
    return filled


def _mask(used: int, rows: int) -> Tensor:
    """(rows,): 1 for the first `used` rows, 0 for those that fill up."""
    return (torch.arange(rows) < used).float()


class ShuffledPlan:
    """Concatenated passes over shuffled data, cut into equal steps: nothing is dropped.

    The order of pass `e` is a permutation keyed by (seed, e), so any step is found directly.
    """

    def __init__(self, samples: int, settings: PlanSettings) -> None:
        self.samples = samples
        self.settings = settings
        self._orders: dict[int, np.ndarray[Any, np.dtype[np.int64]]] = {}

    def steps_per_epoch(self) -> int:
        return -(-self.samples // self.settings.global_batch_size)

    def step(self, step: int) -> list[MicroBatch]:
        size, rows = self.settings.global_batch_size, self.settings.micro_rows
        keys = [self._key(step * size + i) for i in range(size)]
        return [MicroBatch(tuple(keys[i : i + rows]), rows) for i in range(0, size, rows)]

    def _key(self, position: int) -> SampleKey:
        epoch, offset = divmod(position, self.samples)
        return SampleKey(epoch, int(self._order(epoch)[offset]))

    def _order(self, epoch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        if epoch not in self._orders:
            self._orders = {e: o for e, o in self._orders.items() if e == epoch - 1}
            self._orders[epoch] = sample_rng(self.settings.seed, epoch, -1).permutation(
                self.samples
            )
        return self._orders[epoch]


def sample_rng(seed: int, epoch: int, index: int) -> np.random.Generator:
    """The generator of one sample's draws in one pass; index -1 is the pass' own."""
    return np.random.Generator(np.random.Philox(key=[seed, (epoch << 32) | (index & 0xFFFFFFFF)]))
