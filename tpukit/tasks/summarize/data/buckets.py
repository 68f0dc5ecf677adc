"""Batches of a few fixed shapes for samples of any length: next to no arithmetic on padding.

A step's samples are fixed by (seed, step). They are laid out from the longest to the shortest and
cut into micro-batches; each has the shape of the smallest bucket its longest sample fits, and is
filled up with the next shorter ones, so that only a step's last micro-batch has empty rows. Where
shapes are free, each is then cut to what its samples need.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np

from tpukit.tasks.summarize.data.token_cache import SampleSizes
from tpukit.train.task import VALIDATION_EPOCH, MicroBatch, PlanSettings, SampleKey, ShuffledPlan

Array = np.ndarray[Any, Any]

LENGTH_STEP = 8
"""Bucket lengths are multiples of this."""
MOST_LENGTHS_TRIED = 256
GOLDEN_RATIO = (1 + 5**0.5) / 2


@dataclass(frozen=True)
class Bucket:
    """One fixed shape of batches."""

    length: int
    """Tokens of a row."""
    rows: int
    """Rows a device."""
    targets: int
    """Places for targets a device: the vocabulary is projected there and nowhere else."""


def choose_lengths(lengths: Array, count: int, longest: int) -> list[int]:
    """At most `count` bucket lengths, ending in `longest`, with the least padding in all."""
    steps = -(-np.clip(lengths, 1, longest) // LENGTH_STEP)
    # At most MOST_LENGTHS_TRIED candidates: a context of 1024 has 128 of them.
    stride = max(1, -(-(longest // LENGTH_STEP) // MOST_LENGTHS_TRIED))
    candidates = np.unique(-(-steps // stride) * stride) * LENGTH_STEP
    candidates = np.unique(np.append(np.minimum(candidates, longest), longest))
    ends = np.searchsorted(np.sort(lengths), candidates, side="right")
    return _least_padding(candidates, ends, count)


def _least_padding(candidates: Array, ends: Array, count: int) -> list[int]:
    """Dynamic programming: `ends[i]` samples fit candidate i; the last one must be chosen."""
    sizes = len(candidates)
    samples_before = np.concatenate([[0], ends])
    # best[i]: tokens computed for all samples up to candidate i - 1, with the buckets used so far.
    best = np.full(sizes + 1, np.inf)
    best[0] = 0.0
    choices: list[Array] = []
    for _ in range(min(count, sizes)):
        tokens = best[:, None] + (
            samples_before[None, :] - samples_before[:, None]
        ) * np.concatenate([[0], candidates])
        tokens[np.tril_indices(sizes + 1)] = np.inf
        choices.append(tokens.argmin(0))
        best = tokens.min(0)
    chosen, place = [], sizes
    for choice in reversed(choices):
        chosen.append(int(candidates[place - 1]))
        place = int(choice[place])
        if place == 0:
            break
    return sorted(chosen)


@dataclass(frozen=True, eq=False)
class Bucketing:
    """What the shapes of a data set's batches are made from; all its parts share them."""

    lengths: Sequence[int]
    """The bucket lengths."""
    sizes: SampleSizes
    """Sizes of the training samples, which decide how full a bucket is."""
    most_targets: int
    """Most targets of any sample."""

    @classmethod
    def of(cls, train: SampleSizes, valid: SampleSizes | None, count: int) -> Bucketing:
        """At most `count` lengths with the least padding on `train`; they hold `valid` too."""
        parts = [part for part in (train, valid) if part is not None and len(part)]
        longest = max(int(part.lengths.max()) for part in parts)
        most = max(int(part.targets.max()) for part in parts)
        return cls(choose_lengths(train.lengths, count, longest), train, most)

    def buckets(self, rows_per_device: int) -> list[Bucket]:
        """Shapes that hold `rows_per_device` samples of mean length, whatever the bucket.

        All buckets cost about the same memory and time: long ones have fewer rows. Any sample
        fits.
        """
        sizes, most = self.sizes, self.most_targets
        budget = rows_per_device * float(sizes.lengths.mean())
        buckets, shorter = [], 0
        for length in self.lengths:
            rows = max(1, round(budget / length))
            within = sizes.targets[(sizes.lengths > shorter) & (sizes.lengths <= length)]
            own = within if len(within) else sizes.targets
            # Sums of `rows` target counts stay below mean and two deviations, nearly always.
            expected = rows * float(own.mean()) + 2 * float(own.std()) * rows**0.5
            targets = min(max(int(expected), most), rows * most)
            buckets.append(Bucket(length, rows, -(-targets // LENGTH_STEP) * LENGTH_STEP))
            shorter = length
        return buckets


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


class BucketPlan:
    """The samples of `LengthwisePlan`'s steps, cut by length (a BatchPlan)."""

    def __init__(
        self, sizes: SampleSizes, buckets: Sequence[Bucket], settings: PlanSettings
    ) -> None:
        self.sizes = sizes
        self.buckets = buckets
        self.devices = settings.devices
        self.fixed_shapes = settings.compiles
        self._shuffled = LengthwisePlan(sizes, settings)

    def steps_per_epoch(self) -> Fraction:
        return self._shuffled.steps_per_epoch()

    def step(self, step: int) -> list[MicroBatch]:
        keys = [key for micro in self._shuffled.step(step) for key in micro.keys]
        return cut_by_length(
            keys, self.sizes, self.buckets, self.devices, fixed_shapes=self.fixed_shapes
        )


def cut_by_length(
    keys: Sequence[SampleKey],
    sizes: SampleSizes,
    buckets: Sequence[Bucket],
    devices: int,
    *,
    fixed_shapes: bool,
) -> list[MicroBatch]:
    """All keys in micro-batches, the longest first; unless shapes are fixed to the buckets', each
    is cut to what its samples need."""
    lengths = sizes.lengths[[key.sample for key in keys]]
    order = np.argsort(-lengths, kind="stable")
    waiting = [keys[place] for place in order]
    ends = np.searchsorted([bucket.length for bucket in buckets], lengths[order], side="left")
    micro_batches, start = [], 0
    while start < len(waiting):
        bucket = buckets[int(ends[start])]
        if not fixed_shapes:
            left = -(-(len(waiting) - start) // devices)
            longest = int(sizes.lengths[waiting[start].sample])
            bucket = replace(bucket, length=longest, rows=min(bucket.rows, left))
        dealt = _fill(waiting[start : start + bucket.rows * devices], sizes, bucket, devices)
        if not fixed_shapes:
            bucket = replace(bucket, targets=_most_targets(dealt, sizes, bucket.rows))
        micro_batches.append(MicroBatch(tuple(dealt), bucket.rows * devices, bucket))
        start += len(dealt)
    return micro_batches


def _most_targets(keys: Sequence[SampleKey], sizes: SampleSizes, rows: int) -> int:
    """The most targets of any device's `rows` samples."""
    targets = sizes.targets[[key.sample for key in keys]]
    return max(int(targets[i : i + rows].sum()) for i in range(0, len(keys), rows))


def _fill(
    keys: Sequence[SampleKey], sizes: SampleSizes, bucket: Bucket, devices: int
) -> list[SampleKey]:
    """As many of the first keys as fit, dealt so that no device has too many targets."""
    for count in range(len(keys), 1, -1):
        dealt = _deal(keys[:count], sizes, bucket, devices)
        if dealt is not None:
            return dealt
    return list(keys[:1])


def _deal(
    keys: Sequence[SampleKey], sizes: SampleSizes, bucket: Bucket, devices: int
) -> list[SampleKey] | None:
    """Keys in the order of the devices' rows, or None where some device's targets do not fit.

    Rows are filled from the first device on, since a micro-batch's empty rows are its last ones;
    samples go from many targets to few, each to the device with the fewest so far.
    """
    free = [min(max(len(keys) - d * bucket.rows, 0), bucket.rows) for d in range(devices)]
    load = [0] * devices
    hands: list[list[SampleKey]] = [[] for _ in range(devices)]
    for key in sorted(keys, key=lambda key: -int(sizes.targets[key.sample])):
        device = min((d for d in range(devices) if free[d]), key=lambda d: load[d])
        hands[device].append(key)
        free[device] -= 1
        load[device] += int(sizes.targets[key.sample])
    if max(load) > bucket.targets:
        return None
    return [key for hand in hands for key in hand]


def evaluation_plan(
    sizes: SampleSizes, buckets: Sequence[Bucket], devices: int, *, fixed_shapes: bool
) -> Iterator[MicroBatch]:
    """Every sample once, cut by length."""
    keys = [SampleKey(VALIDATION_EPOCH, index) for index in range(len(sizes))]
    yield from cut_by_length(keys, sizes, buckets, devices, fixed_shapes=fixed_shapes)
