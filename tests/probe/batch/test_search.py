"""The search ends with both sides tried, whatever the memory curve looks like."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tpukit.io.units import GIB
from tpukit.probe.batch.search import (
    FILLED,
    TOLERANCE,
    Bracket,
    SearchSettings,
    search,
)
from tpukit.probe.trial import Effort, Trial


class Curve:
    """Trials from a list of memory usages; remembers the batches that were tried."""

    def __init__(
        self, used: list[int], limit: int, *,
        reports: bool = True, fixed: int = 0, effort: Effort | None = None,
    ) -> None:  # fmt: skip
        self.used, self.limit, self.reports, self.fixed = used, limit, reports, fixed
        self.effort = effort
        self.tried: list[int] = []

    def fits(self, batch: int) -> bool:
        return self.used[batch - 1] <= self.limit

    def __call__(self, batch: int, reason: str) -> Trial:
        assert reason
        self.tried.append(batch)
        used = self.used[batch - 1] if self.reports else None
        return Trial(
            batch, self.fits(batch), used, self.limit, self.fixed, effort=self.effort
        )  # fmt: skip


def assert_confirmed(curve: Curve, found: Bracket, sought: SearchSettings) -> None:
    step, top = sought.multiple_of, sought.top
    assert curve.tried == list(found.trials)
    assert len(set(curve.tried)) == len(curve.tried), "a batch was tried twice"
    assert all(b % step == 0 and 0 < b <= top for b in curve.tried)
    if found.low:
        assert found.low in curve.tried
        assert curve.fits(found.low)
    if found.high is None:
        assert found.low == top
    else:
        assert found.high == found.low + step
        assert found.high in curve.tried
        assert not curve.fits(found.high)


@settings(deadline=None)
@given(
    used=st.lists(st.integers(0, 40 * GIB), min_size=1, max_size=200),
    start=st.integers(1, 300),
    multiple=st.integers(1, 9),
    reports=st.booleans(),
    fixed=st.integers(0, 20 * GIB),
    effort=st.sampled_from([None, "fast"]),
)
def test_any_curve_ends_with_both_sides_tried(used, start, multiple, reports, fixed, effort):
    used = used + [used[-1]] * max(0, multiple - len(used))
    sought = SearchSettings(start, len(used), multiple)
    curve = Curve(used, 16 * GIB, reports=reports, fixed=fixed, effort=effort)
    assert_confirmed(curve, search(curve, sought), sought)


@settings(deadline=None)
@given(
    fixed=st.integers(1, 10 * GIB),
    slope=st.integers(2**20, 4 * GIB),
    knee=st.integers(1, 500),
    flat=st.floats(0.05, 1.0),
    noise=st.lists(st.integers(-(2**28), 2**28), min_size=7, max_size=7),
    start=st.integers(1, 64),
)
def test_curves_that_flatten_take_few_trials(fixed, slope, knee, flat, noise, start):
    used = [
        fixed + int(slope * min(b, knee) + flat * slope * max(0, b - knee)) + noise[b % 7]
        for b in range(1, 2049)
    ]
    sought = SearchSettings(start, 2048)
    curve = Curve(used, 16 * GIB, fixed=fixed)
    assert_confirmed(curve, search(curve, sought), sought)
    assert len(curve.tried) <= 24


def gpt2_on_a_v5e_chip() -> Curve:
    known = {4: 5.15, 8: 8.66, 12: 12.4, 16: 14.6, 18: 14.9, 20: 15.66, 21: 16.39, 22: 16.5}
    points = sorted(known)
    used = [int(known[min(points, key=lambda p: (abs(p - b), p))] * GIB) for b in range(1, 65)]
    used[20:] = [int((16.39 + 0.1 * ((b * 7) % 5)) * GIB) for b in range(21, 65)]
    return Curve(used, int(15.75 * GIB), fixed=int(1.42 * GIB), effort="fast")


def test_gpt2_on_a_v5e_chip_takes_two_trials():
    curve = gpt2_on_a_v5e_chip()
    found = search(curve, SearchSettings(4, 64), TOLERANCE)
    assert (found.low, found.high) == (20, None)
    assert curve.tried == [4, 20]


@settings(deadline=None)
@given(
    limit=st.floats(4, 1000),
    fixed=st.floats(0.01, 0.5),
    flattens=st.floats(0.75, 1.0),
    farther=st.floats(1.0, 1.6),
    excess=st.lists(st.floats(0.01, 0.1), min_size=5, max_size=5),
)
@example(limit=59.99, fixed=0.5, flattens=0.75, farther=1.0, excess=[0.0625] * 5)
def test_a_compiler_that_recomputes_near_the_limit_takes_few_trials(
    limit, fixed, flattens, farther, excess
):
    """Linear up to a share of the memory, then flat up to `farther` times the linear limit; what
    does not fit requests a little more than there is, the same at any batch."""
    knee = (flattens - fixed) / (1 - fixed) * limit
    most = max(limit * farther, knee + 1e-6)

    def share(batch: int) -> float:
        if batch <= knee:
            return fixed + (1 - fixed) * batch / limit
        if batch <= most:
            return flattens + (1 - flattens) * (batch - knee) / (most - knee)
        return 1 + excess[batch % 5]

    curve = Curve([int(16 * GIB * share(b)) for b in range(1, 2049)], 16 * GIB,
                  fixed=int(16 * GIB * fixed), effort="fast")  # fmt: skip
    found = search(curve, SearchSettings(4, 2048), TOLERANCE)
    assert len(curve.tried) <= 6
    assert curve.fits(found.low)
    if found.trials[found.low].memory_share < FILLED:
        assert found.high is not None
        assert not curve.fits(found.high)
        assert found.high - found.low <= max(1, TOLERANCE * found.low)


@pytest.mark.parametrize(
    ("curve", "start", "low", "high", "most"),
    [
        (Curve([GIB + b * 2**28 for b in range(1, 201)], 11 * GIB, fixed=GIB), 4, 40, 41, 3),
        (Curve([20 * GIB] * 64, 16 * GIB), 16, 0, 1, 12),
        (Curve([GIB] * 100, 16 * GIB), 4, 100, None, 6),
        (Curve([b * GIB for b in range(1, 1025)], 100 * GIB, reports=False), 1024, 100, 101, 12),
    ],
    ids=["linear", "nothing-fits", "everything-fits", "silent"],
)
def test_a_curve_is_known_after_a_few_trials(curve, start, low, high, most):
    found = search(curve, SearchSettings(start, len(curve.used)))
    assert (found.low, found.high) == (low, high)
    assert {low or high, high or low} <= {*curve.tried} and len(curve.tried) <= most


@pytest.mark.parametrize(
    ("least", "base", "a_sample", "growth", "largest", "trials"),
    [
        (265_400_000, 208_800_000, 1_276_500, 1_103_400, 228, 6),
        pytest.param(212_000_000, 140_000_000, 2_610_000, 2_640_000, 137, 5, id="refinement"),
    ],
)
def test_a_cpu_that_reports_nothing_when_it_fails(
    least, base, a_sample, growth, largest, trials
):  # fmt: skip
    """Memory of the smallest EIT network under 500 MB: small batches suggest too much, as their
    peak is the copy of a checkpoint (`least`)."""
    tried = []

    def measured(batch: int, reason: str) -> Trial:
        tried.append(batch)
        used = max(least, base + a_sample * batch)
        if used > 500_000_000:
            return Trial(batch, False, None, 500_000_000)
        grows = 3_850_000 if batch < 20 else growth
        return Trial(batch, True, used, 500_000_000, used - grows * batch)

    found = search(measured, SearchSettings(start=4))
    assert (found.low, found.high) == (largest, largest + 1)
    assert len(tried) <= trials
