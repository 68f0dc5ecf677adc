"""Which samples make up a step: a pure function of (seed, step)."""

import math
from collections import Counter

import pytest

from tpukit.train.task import MicroBatch, PlanSettings, SampleKey, ShuffledPlan, sample_rng


def plan(samples=10, size=4, rows=4, seed=0):
    return ShuffledPlan(samples, PlanSettings(size, rows, 1, seed))


def keys(some_plan, step):
    return [key for micro in some_plan.step(step) for key in micro.keys]


def test_every_sample_once_a_pass_and_nothing_dropped():
    seen = [key for step in range(5) for key in keys(plan(), step)]
    assert Counter(key.sample for key in seen) == dict.fromkeys(range(10), 2)
    assert len(set(seen)) == 20


def test_any_step_is_found_directly():
    forward, jumped = plan(), plan()
    for step in range(7):
        keys(forward, step)
    assert keys(forward, 3) == keys(jumped, 3)


def test_passes_and_seeds_differ():
    first = [key.sample for step in range(5) for key in keys(plan(), step)]
    assert first[:10] != first[10:]
    assert first != [key.sample for step in range(5) for key in keys(plan(seed=1), step)]


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_accumulation_cuts_the_same_samples(rows):
    assert keys(plan(rows=rows), 2) == keys(plan(rows=4), 2)


@pytest.mark.parametrize(
    ("samples", "batch", "epochs", "steps"),
    [(100, 64, 10, 16), (100, 16, 3, 19), (64, 64, 5, 5), (65, 64, 1, 2), (65, 64, 64, 65)],
)
def test_epochs_are_counted_in_samples(samples, batch, epochs, steps):
    """No remainder of a pass is counted as a whole step: the last step may begin another pass."""
    for rows in (batch, batch // 2):
        shuffled = plan(samples, batch, rows)
        assert math.ceil(epochs * shuffled.steps_per_epoch()) == steps
        seen = Counter(key.epoch for step in range(steps) for key in keys(shuffled, step))
        assert [seen[epoch] for epoch in range(epochs)] == [samples] * epochs
        assert seen.total() - epochs * samples < batch


def test_shares_are_disjoint_and_whole():
    micro = MicroBatch(tuple(SampleKey(0, i) for i in range(5)), rows=8)
    shares = [micro.share(process, 4) for process in range(4)]
    assert [len(share.keys) for share in shares] == [2, 2, 1, 0]
    assert sum((share.keys for share in shares), ()) == micro.keys
    assert {share.rows for share in shares} == {2}


def test_an_empty_share_is_filled_from_its_own_micro_batch():
    keys = tuple(SampleKey(0, i) for i in (7, 3, 5))
    empty = MicroBatch(keys, rows=8, shape=16, samples=("a", "b", "c")).share(3, 4)
    assert (empty.keys, empty.filler, empty.shape) == ((), SampleKey(0, 7), 16)
    assert empty.samples == ("a",)
    assert MicroBatch(keys, 8, counts=(2, 1)).share(1, 2).filler == SampleKey(0, 7)


@pytest.mark.parametrize(("samples", "rows"), [(5, [4, 2]), (4, [4]), (1, [2])])
def test_no_device_has_both_samples_and_filled_rows(samples, rows):
    keys = tuple(SampleKey(0, i) for i in range(samples))
    parts = MicroBatch(keys, rows=16, shape=7).without_filled_rows(2)
    assert [part.rows for part in parts] == rows
    assert sum((part.keys for part in parts), ()) == keys
    packed = MicroBatch(keys, rows=16, counts=(samples,))
    assert packed.without_filled_rows(2) == [packed]
    for share in (part.share(rank, 2) for part in parts for rank in range(2)):
        assert (len(share.keys), share.shape) in [(share.rows, 7), (0, 7)]


def test_draws_depend_on_seed_epoch_and_sample_alone():
    draws = {
        sample_rng(seed, epoch, sample).integers(2**62)
        for seed in (0, 1) for epoch in (0, 1) for sample in (0, 1, 2)
    }  # fmt: skip
    assert len(draws) == 12
    assert sample_rng(3, 4, 5).integers(2**62) == sample_rng(3, 4, 5).integers(2**62)
