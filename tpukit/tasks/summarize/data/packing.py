"""Rows that hold several samples each, one after the other: one shape, next to no padding.

Where each shape is compiled, for minutes on a TPU, buckets are few, and where a batch is split over
eight devices most of their rows stay empty. A step's samples, fixed by (seed, step), are laid from
the longest to the shortest into the row with the most room left; the mask of attention
(`ModelOps.attention`, `starts`) keeps them apart.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np

from tpukit.tasks.summarize.data.buckets import (
    LENGTH_STEP,
    Bucket,
    Bucketing,
    LengthwisePlan,
)
from tpukit.tasks.summarize.data.token_cache import SampleSizes
from tpukit.train.task import VALIDATION_EPOCH, MicroBatch, PlanSettings, SampleKey

ROW_STEP = 128
"""Rows' lengths are multiples of this, the lanes of a TPU's registers."""
LENGTH_OF_THE_REST = 12 * 768
"""The length at which GPT-2's causal attention costs as much as its products with weights."""
LOST = 1.02
"""Tokens of the rows to those of the samples that fit."""
SURE_SAMPLES, SURE_PASSES = 2**17, 64
"""First samples of a run, in at most 64 passes, whose steps surely fit their number of
micro-batches: a second one beside the first is another program, with gradients held beside it."""


def packed_shape(data: Bucketing, settings: PlanSettings) -> Bucket:
    """The one shape of a run's batches: the smallest that holds each of the first steps of these
    samples in its number of micro-batches, and any sample."""
    sizes, longest, size = data.sizes, data.lengths[-1], settings.global_batch_size
    parts = -(-size // settings.micro_rows) * settings.devices
    tokens, targets = (size * float(n.mean()) / parts for n in (sizes.lengths, sizes.targets))
    shapes = [
        (_rounded(max(longest, tokens / rows), ROW_STEP), rows)
        for rows in range(1, math.ceil(tokens / longest) + 1)
    ]
    length, rows = min(shapes, key=lambda shape: _cost(*shape))
    places = _rounded(max(targets, data.most_targets), LENGTH_STEP)
    return _made_sure(Bucket(length, rows, places), data, settings)


@functools.lru_cache(maxsize=8)
def _made_sure(shape: Bucket, data: Bucketing, settings: PlanSettings) -> Bucket:
    """This shape or the next larger one that holds each of the first steps."""
    steps, sizes = LengthwisePlan(data.sizes, settings), data.sizes
    samples = min(SURE_SAMPLES, SURE_PASSES * len(sizes))
    for step in range(-(-samples // settings.global_batch_size)):
        planned = steps.step(step)
        keys = [key for micro in planned for key in micro.keys]
        groups = settings.devices * len(planned)
        while _pack(keys, sizes, shape, groups) is None:
            if _pack(keys, sizes, replace(shape, targets=shape.length * shape.rows), groups):
                shape = replace(shape, targets=shape.targets + LENGTH_STEP)
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

    def __init__(self, sizes: SampleSizes, shape: Bucket, settings: PlanSettings) -> None:
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


def evaluation_packs(sizes: SampleSizes, shape: Bucket, settings: PlanSettings) -> list[MicroBatch]:
    """Every sample once, in as few micro-batches as it takes."""
    keys = [SampleKey(VALIDATION_EPOCH, index) for index in range(len(sizes))]
    room = shape.length * shape.rows * settings.devices
    count = math.ceil(LOST * float(sizes.lengths.sum()) / room)
    return pack(keys, sizes, shape, settings, count)


def pack(
    keys: Sequence[SampleKey],
    sizes: SampleSizes,
    shape: Bucket,
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


def _cut(part: list[list[SampleKey]], sizes: SampleSizes, shape: Bucket) -> Bucket:
    """The least shape that holds these rows."""
    length, targets = (
        np.array([sum(int(of[key.sample]) for key in row) for row in part])
        for of in (sizes.lengths, sizes.targets)
    )
    most = int(targets.reshape(-1, shape.rows).sum(1).max())
    return replace(shape, length=max(1, int(length.max())), targets=max(1, most))


def _pack(
    keys: Sequence[SampleKey], sizes: SampleSizes, shape: Bucket, groups: int
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
        heapq.heapreplace(room, (left + length, row))
        for one in passed:
            heapq.heappush(room, one)
        rows[row].append(key)
        places[row // shape.rows] -= targets
    return rows
