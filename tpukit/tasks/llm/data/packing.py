"""Rows that hold several samples each, one after the other: one shape, next to no padding.

A step's samples, fixed by (seed, step), are laid from the longest to the shortest into the row with
the most room left; the mask of attention (`ModelOps.attention`, `starts`) keeps them apart. For
models whose layers would mix them a row holds one sample.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np

from tpukit.tasks.llm.data.token_cache import SampleSizes
from tpukit.train.task import VALIDATION_EPOCH, MicroBatch, PlanSettings, SampleKey, ShuffledPlan

Array = np.ndarray[Any, Any]
ROW_STEP = 128
"""Rows' lengths are multiples of this, the lanes of a TPU's registers."""
TARGET_STEP = 8
"""Numbers of targets are multiples of this."""
LENGTH_OF_THE_REST = 12 * 768
"""The length at which GPT-2's causal attention costs as much as its products with weights."""
LOST = 1.02
"""Tokens of the rows to those of the samples that fit."""
SURE_SAMPLES, SURE_PASSES = 2**17, 64
"""First samples of a run, in at most 64 passes, whose steps surely fit their number of
micro-batches: a second one beside the first is another program, with gradients held beside it."""
GOLDEN_RATIO = (1 + 5**0.5) / 2


@dataclass(frozen=True)
class RowShape:
    """The one shape of batches."""

    length: int
    """Tokens of a row."""
    rows: int
    """Rows a device."""
    targets: int
    """Places for targets a device: the vocabulary is projected there and nowhere else."""
    packed: bool = True
    """Rows hold several samples; else one."""


@dataclass(frozen=True, eq=False)
class SetSizes:
    """What the shape of a data set's batches is made from; all its parts share it."""

    train: SampleSizes
    """Sizes of the training samples, which decide how full a row is."""
    longest: int
    """Tokens of the longest sample of any part."""
    most_targets: int
    """Most targets of any sample."""

    @classmethod
    def of(cls, *parts: SampleSizes) -> SetSizes:
        """Of the training samples, and of others that the shape must hold too."""
        filled = [part for part in parts if len(part)]
        longest = max(int(part.lengths.max()) for part in filled)
        return cls(parts[0], longest, max(int(part.targets.max()) for part in filled))


class LengthwisePlan(ShuffledPlan):
    """Steps with samples of all lengths: their sums hardly differ, so that one shape fits all.

    The samples of a pass are grouped by length, as many groups as a step has samples. Each group is
    shuffled and spread evenly over the pass.
    """

    def __init__(self, sizes: SampleSizes, settings: PlanSettings) -> None:
        super().__init__(len(sizes), settings)
        members = max(1, round(len(sizes) / settings.global_batch_size))
        self._group = np.empty(len(sizes), np.int64)
        self._group[np.argsort(sizes.lengths, kind="stable")] = np.arange(len(sizes)) // members

    def draw_order(self, epoch: int) -> Array:
        shuffled = super().draw_order(epoch)
        by_group = shuffled[np.argsort(self._group[shuffled], kind="stable")]
        group, counts = self._group[by_group], np.bincount(self._group)
        turn = np.arange(len(by_group)) - np.repeat(np.cumsum(counts) - counts, counts)
        # Any part of a turn holds groups of all lengths: multiples of the golden ratio.
        places = (turn + group * GOLDEN_RATIO % 1) * (counts.max() / counts[group])
        return by_group[np.argsort(places)]


def packed_shape(data: SetSizes, settings: PlanSettings, *, packed: bool = True) -> RowShape:
    """The one shape of a run's batches: the smallest that holds each of the first steps of these
    samples in its number of micro-batches, and any sample."""
    sizes, longest, size = data.train, data.longest, settings.global_batch_size
    parts = -(-size // settings.micro_rows) * settings.devices
    tokens, targets = (size * float(n.mean()) / parts for n in (sizes.lengths, sizes.targets))
    shapes = [
        (_rounded(max(longest, tokens / rows), ROW_STEP), rows)
        for rows in range(1, math.ceil(tokens / longest) + 1)
    ]
    length, rows = min(shapes, key=lambda shape: _cost(*shape))
    if not packed:
        length, rows = longest, math.ceil(size / parts)
    places = _rounded(max(targets, data.most_targets), TARGET_STEP)
    return _made_sure(RowShape(length, rows, places, packed), data, settings)


@functools.lru_cache(maxsize=8)
def _made_sure(shape: RowShape, data: SetSizes, settings: PlanSettings) -> RowShape:
    """This shape or the next larger one that holds each of the first steps."""
    steps, sizes = LengthwisePlan(data.train, settings), data.train
    samples = min(SURE_SAMPLES, SURE_PASSES * len(sizes))
    for step in range(-(-samples // settings.global_batch_size)):
        planned = steps.step(step)
        keys = [key for micro in planned for key in micro.keys]
        groups = settings.devices * len(planned)
        while _pack(keys, sizes, shape, groups) is None:
            if _pack(keys, sizes, replace(shape, targets=shape.length * shape.rows), groups):
                shape = replace(shape, targets=shape.targets + TARGET_STEP)
                continue
            longer = replace(shape, length=shape.length + ROW_STEP)
            more = replace(shape, rows=shape.rows + 1)
            shape = min(longer, more, key=lambda shape: _cost(shape.length, shape.rows))
    return shape


def _cost(length: int, rows: int) -> int:
    """Operations of a batch, in those of attention to one token: it grows with the row's length."""
    return length * rows * (LENGTH_OF_THE_REST + length)


def _rounded(value: float, step: int) -> int:
    return math.ceil(value / step) * step


class PackedPlan:
    """The samples of `LengthwisePlan`'s steps, packed (a BatchPlan)."""

    def __init__(self, sizes: SampleSizes, shape: RowShape, settings: PlanSettings) -> None:
        self.sizes = sizes
        self.shape = shape
        self.settings = settings
        self._shuffled = LengthwisePlan(sizes, settings)

    def steps_per_epoch(self) -> Fraction:
        return self._shuffled.steps_per_epoch()

    def step(self, step: int) -> list[MicroBatch]:
        planned = self._shuffled.step(step)
        keys = [key for micro in planned for key in micro.keys]
        return pack(keys, self.sizes, self.shape, self.settings, len(planned))


def evaluation_packs(
    sizes: SampleSizes, shape: RowShape, settings: PlanSettings
) -> list[MicroBatch]:
    """Every sample once, in as few micro-batches as it takes."""
    keys = [SampleKey(VALIDATION_EPOCH, index) for index in range(len(sizes))]
    rows = LOST * float(sizes.lengths.sum()) / shape.length if shape.packed else len(sizes)
    count = math.ceil(rows / (shape.rows * settings.devices))
    return pack(keys, sizes, shape, settings, count)


def pack(
    keys: Sequence[SampleKey],
    sizes: SampleSizes,
    shape: RowShape,
    settings: PlanSettings,
    count: int,
) -> list[MicroBatch]:
    """All keys in `count` micro-batches of this shape, or as many more as it takes; where nothing
    is compiled, each is cut to what its samples need."""
    while True:
        rows = _pack(keys, sizes, shape, settings.devices * count)
        if rows is not None:
            break
        count += max(1, count // 50)
    across = shape.rows * settings.devices
    parts = [rows[i * across : (i + 1) * across] for i in range(count)]
    return [
        MicroBatch(
            tuple(key for row in part for key in row), across,
            shape if settings.compiles else _cut(part, sizes, shape),
            counts=tuple(len(row) for row in part),
        )
        for part in parts
    ]  # fmt: skip


def _cut(part: list[list[SampleKey]], sizes: SampleSizes, shape: RowShape) -> RowShape:
    """The least shape that holds these rows."""
    length, targets = (
        np.array([sum(int(of[key.sample]) for key in row) for row in part])
        for of in (sizes.lengths, sizes.targets)
    )
    most = int(targets.reshape(-1, shape.rows).sum(1).max())
    return replace(shape, length=max(1, int(length.max())), targets=max(1, most))


def _pack(
    keys: Sequence[SampleKey], sizes: SampleSizes, shape: RowShape, groups: int
) -> list[list[SampleKey]] | None:
    """The rows of `groups` devices in turn; None where some sample finds no room."""
    rows: list[list[SampleKey]] = [[] for _ in range(groups * shape.rows)]
    room = [(-shape.length, row) for row in range(len(rows))]
    places = [shape.targets] * groups
    for key in sorted(keys, key=lambda key: -int(sizes.lengths[key.sample])):
        length, targets = int(sizes.lengths[key.sample]), int(sizes.targets[key.sample])
        passed = []
        while room and targets > places[room[0][1] // shape.rows]:
            passed.append(heapq.heappop(room))
        if not room or -room[0][0] < length:
            return None
        left, row = room[0]
        heapq.heapreplace(room, (left + length if shape.packed else 0, row))
        for one in passed:
            heapq.heappush(room, one)
        rows[row].append(key)
        places[row // shape.rows] -= targets
    return rows
