"""Lengths that cost the fewest tokens, and steps of texts that are alike long."""

from itertools import combinations

import numpy as np
import pytest

from tpukit.tasks.text.data.lengths import AlikePlan, LengthShapes, chosen_lengths
from tpukit.train.task import PlanSettings


def filled(lengths, chosen):
    return sum(next(n for n in chosen if n >= length) for length in lengths)


@pytest.mark.parametrize("seed", range(6))
def test_no_other_lengths_need_fewer_tokens(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 100, 40)
    tops = sorted({-(-int(n) // 8) * 8 for n in lengths})
    for count in (1, 2, 3, 20):
        chosen = chosen_lengths(lengths, count, 1000)
        assert len(chosen) <= count and set(chosen) <= {*tops}
        others = [c for c in combinations(tops, min(count, len(tops))) if c[-1] == tops[-1]]
        assert filled(lengths, chosen) == min(filled(lengths, other) for other in others)
    assert chosen_lengths(np.array([5, 30, 33]), 2, 33)[-1] == 33


@pytest.mark.parametrize(("samples", "size", "rows"), [(100, 16, 8), (37, 5, 5), (400, 4, 2)])
def test_each_pass_has_every_sample_once_in_steps_of_alike_lengths(samples, size, rows):
    lengths = np.random.default_rng(1).integers(4, 120, samples)
    fixed = chosen_lengths(lengths, 4, 128)
    plan = AlikePlan(LengthShapes(lengths, fixed, True), PlanSettings(size, rows, 1, 0))
    steps = [plan.step(step) for step in range(-(-3 * samples // size))]
    keys = [key for step in steps for micro in step for key in micro.keys]
    seen = [key for key in keys if key.epoch < 3]
    assert len({*seen}) == len(seen) == 3 * samples
    again = AlikePlan(plan.shapes, plan.settings)
    assert [again.step(step) for step in (5, 1)] == [steps[5], steps[1]]
    shapes = [micro.shape for step in steps for micro in step]
    assert steps[0][-1].shape == max(step[-1].shape for step in steps[:2])
    assert {*shapes} <= {*fixed}
    for step in steps:
        for micro in step:
            assert len(micro.keys) == rows == micro.rows
            assert micro.shape >= max(lengths[key.sample] for key in micro.keys)
    mixed = sum(np.ptp([lengths[k.sample] for m in s for k in m.keys]) for s in steps)
    assert mixed < 0.7 * len(steps) * 116


def test_where_nothing_is_compiled_a_batch_is_as_long_as_its_texts():
    lengths = np.array([3, 9, 17, 100])
    shapes = LengthShapes(lengths, [104], False)
    parts = [*shapes.all_once(PlanSettings(2, 2, 1, 0))]
    assert [part.shape for part in parts] == [16, 104]
    assert sorted(key.sample for part in parts for key in part.keys) == [0, 1, 2, 3]
