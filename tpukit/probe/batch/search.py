"""The search for the largest batch that fits.

The search trusts nothing but trials. It keeps a bracket (the largest batch seen to fit, a larger
one seen not to), guesses inside or above it from the memory usage so far, and ends when the two
are neighbours: both were tried. Memory need not grow with the batch, nor grow evenly: a compiler
near the limit trades operations for memory, and what a failure requested goes up and down.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from tpukit.probe.batch.trial import Trial

FARTHEST_JUMP = 64
"""Times the batch that fits. Too far costs a failure, which is quicker than a trial that fits."""
SHARE_AFTER_A_WRONG_LINE = 0.8
"""Of the way to a guess that failed: a line to 228 through 65 was seen to be a tenth too far."""
CLOSE = 8
"""Multiples: in a bracket so narrow the next batch under the failed one is tried."""
COMPILER_STRETCH = 1.33
"""A jump of a search by the compiler from afar, times the linear guess: it recomputes near the
limit, and GPT-2 and EfficientNet fitted a third more than a line predicted."""
FAR = 0.8
"""Less of the memory than this is far from the limit."""
WORTH_A_JUMP = 1.5
"""Times the batch that fits: a batch within the margin that far away is tried before the largest,
which a line through it finds."""
LEAST_GROWTH = 1.2
"""Times the batch that fits: jumps from nearer."""
FILLED = 0.9
"""Of the memory, where a search by the compiler ends: a larger batch would be slower, if it fits at
all, and leaves no margin."""
APART = 0.9
"""Of a batch: a line to a smaller one that is nearer than this shows noise."""
TOLERANCE = 0.1
"""Of the largest batch: how close a search by the compiler comes to it unless it is exact."""

Reason = str
TryBatch = Callable[[int, Reason], Trial]
"""Tries a batch; the reason is for people who watch."""


@dataclass(frozen=True)
class SearchSettings:
    """Which batches are tried, and which one is recommended.

    The options of `probe-batch` are made from these fields and their docstrings.
    """

    start: int = 4
    """First batch a device to try."""
    max: int = 4096
    """Largest batch a device to try."""
    multiple_of: int = 1
    """Try multiples of this only."""
    margin: float = 0.05
    """Part of the memory that the recommended batch leaves free."""
    global_batch_size: int | None = None
    """Find the gradient accumulation steps that reach this global batch size (default: none)."""
    time_limit: float | None = None
    """Longest time for a trial (default: 10m; 30m with --target)."""
    exact: bool = False
    """With --target, find the largest batch to the last sample (default: within 10 %)."""

    @property
    def top(self) -> int:
        """The largest multiple that may be tried."""
        return self.max // self.multiple_of * self.multiple_of


@dataclass
class Bracket:
    """The trials of a search: `low` fits, `high` does not; 0 and None where there is none yet."""

    trials: dict[int, Trial] = field(default_factory=dict)
    low: int = 0
    high: int | None = None
    stalled: bool = False
    """The last trial left more than half of the bracket."""

    def record(self, trial: Trial, step: int) -> None:
        """Takes in a trial of a batch inside the bracket; batches are `step` apart."""
        width = None if self.high is None else self.high - self.low
        self.trials[trial.batch] = trial
        if trial.fits:
            self.low = trial.batch
        else:
            self.high = trial.batch
        # A half, rounded to a step, does not count as a stall.
        self.stalled = width is not None and 2 * ((self.high or 0) - self.low) > width + 2 * step

    def is_finished(self, step: int, top: int) -> bool:
        """Whether the two ends are neighbours, or the largest batch allowed fits."""
        if self.high is None:
            return self.low >= top
        return self.high - self.low <= step


def search(try_batch: TryBatch, settings: SearchSettings) -> Bracket:
    """Tries batches until one fits and the next one (a multiple further on) does not.

    The result's `low` is the largest batch (0: none fits); its `high` the next one, None where
    `max` was reached.
    """
    step, top = settings.multiple_of, settings.top
    bracket = Bracket()
    batch, reason = _first(settings), "the start"
    while True:
        bracket.record(try_batch(batch, reason), step)
        if bracket.is_finished(step, top):
            return bracket
        if bracket.high is None:
            batch, reason = _above(bracket, settings)
            batch = min(batch, top)
        else:
            batch, reason = _inside(bracket, step)


def search_near(
    try_batch: TryBatch, settings: SearchSettings, tolerance: float, goal: float = 1.0
) -> Bracket:
    """Tries batches until the largest that fits is known to within a part `tolerance` of it.

    For trials by the compiler: memory grows along a line at first, and more slowly near the limit.
    Ends early where the memory is nearly full; `high` is None then, and where `max` was reached.

    goal: part of the memory that jumps aim at.
    """
    step, top = settings.multiple_of, settings.top
    bracket = Bracket()
    batch, reason = _first(settings), "the start"
    while True:
        bracket.record(try_batch(batch, reason), step)
        low, high = bracket.low, bracket.high
        filled = tolerance and low and bracket.trials[low].memory_share >= FILLED
        if filled or low >= top:
            return bracket
        if high is not None and high - low <= max(step, tolerance * low):
            return bracket
        guess, reason = _near(bracket, tolerance, goal)
        most = top if high is None else high - step
        batch = min(max(_rounded(guess, step), low + step), most)


def _first(settings: SearchSettings) -> int:
    step, top = settings.multiple_of, settings.top
    if top < step:
        raise ValueError(f"max {settings.max} is below one multiple of {step}")
    return min(max(settings.start // step * step, step), top)


def _near(bracket: Bracket, tolerance: float, goal: float) -> tuple[float, Reason]:
    """The next batch of `search_near`."""
    low, high = bracket.low, bracket.high
    line = _linear_limit(bracket, goal)
    if high is None:
        if line is None:
            return 2 * low, "memory usage unknown: twice as much"
        stretch = COMPILER_STRETCH if bracket.trials[low].memory_share < FAR else 1.0
        guess = stretch * line
        return max(guess, LEAST_GROWTH * low), "where memory reaches the limit by what was tried"
    if low == 0:
        crossing = _crossing(bracket, high)
        return crossing or high / 2, f"{high} does not fit: scaled by what it requested"
    between = f"between {low}, which fits, and {high}, which does not"
    if _previous_fit(bracket) is None and line is not None:
        if line * (1 + tolerance) < high:
            return line, f"where a line reaches the limit, {between}"
        if line < high + 1:
            under = math.ceil(high / (1 + tolerance))
            return under, f"a little under {high}, which should have fitted"
    return _middle(low, high), f"half way {between}"


def _above(bracket: Bracket, settings: SearchSettings) -> tuple[int, Reason]:
    """The next batch where everything so far fits: as far as memory says, at least galloping."""
    low, step = bracket.low, settings.multiple_of
    gallop = _little_more(bracket, step)
    guess = _linear_limit(bracket)
    if guess is None:
        return _rounded(max(2 * low, gallop), step), "memory usage unknown: twice as much"
    within = _linear_limit(bracket, 1 - settings.margin)
    if (
        len(bracket.trials) == 2
        and within is not None
        and _rounded(within, step) >= WORTH_A_JUMP * low
    ):
        # It may be recommended, and the line through it leads closer to the limit.
        return _rounded(within, step), f"leaves {settings.margin:.0%} of the memory free"
    batch = _rounded(min(guess, FARTHEST_JUMP * low), step)
    if batch < gallop:
        return gallop, f"{low} fits close to the limit: a little more"
    return batch, "where memory reaches the limit by what was tried"


def _linear_limit(bracket: Bracket, share: float = 1.0) -> float | None:
    """The batch at which a line through those that fit reaches this share of the memory limit."""
    low = bracket.low
    trial = bracket.trials.get(low)
    if trial is None or trial.used_bytes is None or trial.limit_bytes is None:
        return None
    slope = (trial.used_bytes - (trial.fixed_bytes or 0)) / low
    before = _previous_fit(bracket, at_most=APART * low) or _previous_fit(bracket)
    if before is not None:
        earlier = bracket.trials[before].used_bytes
        line = 0.0 if earlier is None else (trial.used_bytes - earlier) / (low - before)
        # Flatter than the share that grows: the smaller batch's peak was not in its step, unless
        # the line before says the same. A compiler's step does grow less where it recomputes.
        least = slope if trial.effort is None else slope / 2
        if line > least or _was_as_flat(bracket, before, line):
            slope = line
    if slope <= 0:
        return None
    return low + (share * trial.limit_bytes - trial.used_bytes) / slope


def _was_as_flat(bracket: Bracket, batch: int, line: float) -> bool:
    """Whether memory grew by no more than twice `line` up to `batch`, too."""
    before = _previous_fit(bracket, at_most=batch - 1)
    used = [bracket.trials[b].used_bytes for b in (before, batch) if b is not None]
    if before is None or None in used or line <= 0:
        return False
    first, last = (float(size or 0) for size in used)
    return last - first <= 2 * line * (batch - before)


def _previous_fit(bracket: Bracket, at_most: float = math.inf) -> int | None:
    """The largest batch that fits below `low`, and is not above `at_most`."""
    below = [b for b, trial in bracket.trials.items() if trial.fits and b < bracket.low]
    return max((b for b in below if b <= at_most), default=None)


def _inside(bracket: Bracket, step: int) -> tuple[int, Reason]:
    """The next batch strictly between `low` and `high`.

    Where memory reaches the limit; near `high` where memory says that it fits; else half way.
    """
    low, high = bracket.low, bracket.high
    assert high is not None
    more = _little_more(bracket, step)
    if 2 * (more - low) < high - low and _is_at_the_limit(bracket, step):
        return more, f"{low} fits close to the limit: a little more"
    line = None if bracket.stalled else _linear_limit(bracket)
    guess = None if bracket.stalled else _crossing(bracket, high)
    if guess is None and line is not None and low < line < high:
        guess = line
    reason = f"between {low}, which fits, and {high}, which does not"
    if guess is None and line is not None and line >= high:
        # The line is wrong, but probably not by much.
        is_close = high - low <= CLOSE * step
        guess = high - step if is_close else low + SHARE_AFTER_A_WRONG_LINE * (high - low)
        reason = f"a little under {high}, which should have fitted"
    elif guess is None:
        guess, reason = _middle(low, high), f"half way {reason}"
    elif low == 0:
        reason = f"{high} does not fit: scaled by what it requested"
    return min(max(_rounded(guess, step), low + step), high - step), reason


def _is_at_the_limit(bracket: Bracket, step: int) -> bool:
    """Whether memory says that the next batch is too much."""
    guess = _linear_limit(bracket)
    return guess is not None and bracket.low > 0 and guess < bracket.low + step


def _little_more(bracket: Bracket, step: int) -> int:
    """The next batch, which is nearly always the proof; farther where such steps keep fitting."""
    low = bracket.low
    near = sum(APART * low <= batch < low for batch in bracket.trials)
    return low + (step << max(near - 1, 0))


def _middle(low: int, high: int) -> float:
    """Half way; on a scale of factors where the two are far apart."""
    return math.sqrt(low * high) if 0 < 4 * low < high else (low + high) / 2


def _crossing(bracket: Bracket, high: int) -> float | None:
    """Where a line between the two ends of the bracket crosses the limit."""
    above = bracket.trials[high]
    if above.used_bytes is None or above.limit_bytes is None:
        return None
    below = bracket.trials.get(bracket.low)
    base = below.used_bytes if below else (above.fixed_bytes or 0)
    if base is None or not base <= above.limit_bytes < above.used_bytes:
        return None
    share = (above.limit_bytes - base) / (above.used_bytes - base)
    return bracket.low + share * (high - bracket.low)


def _rounded(batch: float, step: int) -> int:
    return int(batch / step + 1e-9) * step
