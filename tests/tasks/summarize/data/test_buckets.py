"""The plan of batches: every sample once, the same step whatever the devices, little padding."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpukit.tasks.summarize.data.buckets import (
    Bucketing,
    BucketPlan,
    SampleSizes,
    choose_lengths,
    evaluation_plan,
)
from tpukit.train.task import PlanSettings


def sizes_like_samsum(count: int = 5000) -> SampleSizes:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(4.83, 0.6, count).astype(int), 25, 800)
    targets = np.clip((lengths * 0.12 + rng.normal(10, 5, count)).astype(int), 4, 80)
    return SampleSizes(lengths, np.minimum(targets, lengths // 2))


def make_plan(
    sizes: SampleSizes, rows: int, devices: int, batch: int, count: int, *, fixed: bool = True
) -> BucketPlan:
    buckets = Bucketing.of(sizes, None, count).buckets(rows)
    settings = PlanSettings(batch, rows * devices, devices, 0, compiles=fixed)
    return BucketPlan(sizes, buckets, settings)


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.tuples(st.integers(4, 300), st.integers(1, 60)), min_size=8, max_size=60),
    rows=st.integers(1, 9),
    devices=st.sampled_from([1, 2, 8]),
    count=st.integers(1, 6),
    fixed=st.booleans(),
)
def test_every_sample_is_in_its_step_once_and_fits(lengths, rows, devices, count, fixed):  # type: ignore[no-untyped-def]
    sizes = SampleSizes(
        np.array([length + 1 for length, _ in lengths]),
        np.array([min(targets, length) for length, targets in lengths]),
    )
    plan = make_plan(sizes, rows, devices, 8, count, fixed=fixed)
    keys = []
    for step in range(-(-len(sizes) // 8)):
        for micro in plan.step(step):
            bucket = micro.shape
            lengths = [int(sizes.lengths[key.sample]) for key in micro.keys]
            if fixed:
                assert bucket in plan.buckets
            else:
                assert bucket.length == max(lengths)
            assert micro.rows == bucket.rows * devices and micro.rows >= len(micro.keys)
            for device in range(devices):
                own = micro.share(device, devices).keys
                assert sum(sizes.targets[key.sample] for key in own) <= bucket.targets
            assert all(length <= bucket.length for length in lengths)
            keys += micro.keys
    first_pass = [key.sample for key in keys if key.epoch == 0]
    assert sorted(first_pass) == list(range(len(sizes)))


@pytest.mark.parametrize(("rows", "devices"), [(4, 1), (8, 1), (4, 2), (2, 8)])
def test_a_step_has_the_same_samples_whatever_the_devices(rows: int, devices: int) -> None:
    sizes = sizes_like_samsum(500)
    one, other = make_plan(sizes, 16, 1, 64, 6), make_plan(sizes, rows, devices, 64, 6)
    for step in (0, 3, 11):
        assert {k for m in one.step(step) for k in m.keys} == {
            k for m in other.step(step) for k in m.keys
        }


def padding_share(plan: BucketPlan, steps: int) -> float:
    """The part of all computed positions that hold no token."""
    micro_batches = [micro for step in range(steps) for micro in plan.step(step)]
    tokens = sum(int(plan.sizes.lengths[k.sample]) for m in micro_batches for k in m.keys)
    return 1 - tokens / sum(m.rows * m.shape.length for m in micro_batches)


def test_padding_is_little() -> None:
    sizes = sizes_like_samsum()
    padding = {}
    for count in (1, 8, 24):
        plan = make_plan(sizes, 4, 1, 256, count)
        padding[count] = padding_share(plan, 8)
    assert padding[24] < 0.10 < padding[8] < 0.20 and padding[1] > 0.75


def test_free_shapes_are_cut_to_their_samples() -> None:
    sizes = sizes_like_samsum()
    fixed, free = (make_plan(sizes, 4, 1, 256, 8, fixed=fixed) for fixed in (True, False))
    assert padding_share(free, 8) < padding_share(fixed, 8) / 2
    cut, full = ([m for step in range(8) for m in plan.step(step)] for plan in (free, fixed))
    targets = sum(int(sizes.targets[key.sample]) for micro in cut for key in micro.keys)
    assert sum(micro.shape.targets for micro in cut) == targets
    assert sum(micro.shape.targets for micro in full) > 1.1 * targets


def test_bucket_lengths_are_the_best_there_are() -> None:
    lengths = np.random.default_rng(1).integers(1, 64, 200)

    def tokens(chosen: list[int]) -> int:
        return sum(min(c for c in chosen if c >= length) for length in lengths)

    best = min(tokens([a, b, 64]) for a in range(8, 64, 8) for b in range(a + 8, 64, 8))
    assert tokens(choose_lengths(lengths, 3, 64)) == best


def test_evaluation_covers_all_samples() -> None:
    sizes = sizes_like_samsum(333)
    plan = make_plan(sizes, 8, 2, 16, 5)
    keys = [
        k.sample for m in evaluation_plan(sizes, plan.buckets, 2, fixed_shapes=True) for k in m.keys
    ]
    assert sorted(keys) == list(range(333))
