"""Batches of a few fixed lengths, and steps whose samples are alike long."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tpukit.train.task import (
    VALIDATION_EPOCH,
    MicroBatch,
    PlanSettings,
    SampleKey,
    ShuffledPlan,
    sample_rng,
)

MULTIPLE = 8
"""Lengths are multiples of it, as matrix units compute with."""
MOST_STEPS = 50
"""Steps whose samples are sorted together, at most."""
Lengths = NDArray[np.int64]


def chosen_lengths(lengths: Lengths, count: int, most: int) -> list[int]:
    """At most `count` lengths, none above `most`, to which samples are filled up with the fewest
    tokens."""
    rounded = np.minimum(-(-lengths // MULTIPLE) * MULTIPLE, most)
    tops, counts = np.unique(rounded, return_counts=True)
    before = np.concatenate([[0], np.cumsum(counts)])
    # cost[j]: of the samples up to tops[j - 1], with k lengths; last[k][j]: where the
    # longest of them begins.
    cost, last = np.where(before > 0, np.inf, 0.0), []
    for _ in range(min(count, len(tops))):
        each = cost[None, :-1] + tops[:, None] * (before[1:, None] - before[None, :-1])
        each = np.where(np.tri(len(tops), dtype=bool), each, np.inf)
        last.append(each.argmin(1))
        cost = np.concatenate([[0.0], each.min(1)])
    found, end = [], len(tops)
    for begins in reversed(last):
        if end:
            found.append(int(tops[end - 1]))
            end = int(begins[end - 1])
    return found[::-1]


@dataclass(frozen=True)
class LengthShapes:
    """The lengths that batches of a data set have."""

    lengths: Lengths
    """(samples,)"""
    fixed: Sequence[int]
    """Those of compiled programs, from the shortest."""
    compiles: bool

    def with_shape(self, micro: MicroBatch) -> MicroBatch:
        """Where nothing is compiled, a batch is as long as its longest sample."""
        longest = int(max(self.lengths[key.sample] for key in micro.keys))
        if not self.compiles:
            return replace(micro, shape=min(-(-longest // MULTIPLE) * MULTIPLE, self.fixed[-1]))
        return replace(micro, shape=next(n for n in self.fixed if n >= longest))

    def all_once(self, settings: PlanSettings) -> Iterator[MicroBatch]:
        """Every sample once, the shortest first."""
        order, rows = np.argsort(self.lengths, kind="stable").tolist(), settings.micro_rows
        for start in range(0, len(order), rows):
            keys = (SampleKey(VALIDATION_EPOCH, i) for i in order[start : start + rows])
            yield self.with_shape(MicroBatch(tuple(keys), rows))


class AlikePlan:
    """Shuffled passes whose steps hold samples of about one length.

    The samples of some steps that follow each other in `ShuffledPlan` are sorted by length and cut
    anew, and these steps shuffled: each pass still has every sample once. In the first steps each
    shape comes once, the longest first, so that memory and compilation show at once.
    """

    def __init__(self, shapes: LengthShapes, settings: PlanSettings) -> None:
        self.shapes, self.settings = shapes, settings
        self.shuffled = ShuffledPlan(len(shapes.lengths), settings)
        self._known: tuple[int, list[list[MicroBatch]]] = (-1, [])

    def steps_per_epoch(self) -> Fraction:
        return self.shuffled.steps_per_epoch()

    def step(self, step: int) -> list[MicroBatch]:
        first, stop = self._together(step)
        if self._known[0] != first:
            self._known = (first, self._steps(range(first, stop)))
        return self._known[1][step - first]

    def _together(self, step: int) -> tuple[int, int]:
        """The steps that share their samples: of one pass, so that its end changes nothing."""
        length = self.steps_per_epoch()
        epoch = math.floor(step / length)
        begin, end = math.ceil(epoch * length), math.ceil((epoch + 1) * length)
        parts = max(1, math.ceil((end - begin) / MOST_STEPS), min(4, (end - begin) // 2))
        ends = [begin + (end - begin) * part // parts for part in range(parts + 1)]
        return next((a, b) for a, b in pairwise(ends) if a <= step < b)

    def _steps(self, steps: range) -> list[list[MicroBatch]]:
        keys = [k for step in steps for m in self.shuffled.step(step) for k in m.keys]
        lengths = self.shapes.lengths[[key.sample for key in keys]]
        keys = [keys[place] for place in np.argsort(lengths, kind="stable")]
        size, rows = self.settings.global_batch_size, self.settings.micro_rows
        made = [self._cut(keys[i : i + size], rows) for i in range(0, len(keys), size)]
        order = sample_rng(self.settings.seed, steps.start, -2).permutation(len(made)).tolist()
        if steps.start == 0:
            seen: dict[Any, int] = {}
            for place in sorted(order, key=lambda place: -made[place][-1].shape):
                seen.setdefault(made[place][-1].shape, place)
            order = [*seen.values(), *(place for place in order if place not in seen.values())]
        return [made[place] for place in order]

    def _cut(self, keys: Sequence[SampleKey], rows: int) -> list[MicroBatch]:
        parts = [MicroBatch(tuple(keys[i : i + rows]), rows) for i in range(0, len(keys), rows)]
        return [self.shapes.with_shape(part) for part in parts]
