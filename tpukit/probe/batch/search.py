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
from typing import Literal

from tpukit.probe.trial import Trial

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
WORTH_IN_SPEED = 0.1
"""Gain in samples a second for which a search by speed goes on."""
MOST, MOST_COMPILED = 4096, 1024
"""Largest batch a device that is tried by default: measured, and by the compiler, which takes
minutes for a small model in a batch of thousands."""
TOLERANCE = 0.1
"""Of the largest batch: how close a search by the compiler comes to it unless it is exact."""

Ending = Literal["memory", "speed", "time", "data", "max"]
"""Why a search ended: both sides of the largest were tried, or the memory is nearly full; larger
batches are hardly faster; they take too long; all training samples fit; the largest allowed fits.
"""
Reason = str
TryBatch = Callable[[int, Reason], Trial]
"""Tries a batch; the reason is for people who watch."""
Affordable = Callable[["Bracket"], float]


@dataclass(frozen=True)
class SearchSettings:
    """Which batches are tried, and which one is recommended.

    The options of `probe-batch` are made from these fields and their docstrings.
    """

    start: int = 4
    """First batch a device to try."""
    max: int | None = None
    """Largest batch a device to try (default: 4096; 1024 with --target), of the training samples at
    most."""
    multiple_of: int = 1
    """Try multiples of this only."""
    margin: float = 0.05
    """Part of the memory that the recommended batch leaves free."""
    global_batch_size: int | None = None
    """Find the gradient accumulation steps that reach this global batch size (default: none)."""
    time_limit: float | None = None
    """Time after which a trial is ended (default: 10m on a CPU; 30m where programs compile)."""
    trial_time: float | None = None
    """Start no trial that would take longer (default: 2m on a CPU, else the time limit)."""
    max_time: float | None = None
    """Start no trial after this time (default: 15m on a CPU)."""
    exact: bool = False
    """With --target, find the largest batch to the last sample (default: within 10 %)."""

    @property
    def top(self) -> int:
        """The largest multiple that may be tried."""
        return (self.max or MOST) // self.multiple_of * self.multiple_of


@dataclass
class Bracket:
    """The trials of a search: `low` fits, `high` does not; 0 and None where there is none yet."""

    trials: dict[int, Trial] = field(default_factory=dict)
    low: int = 0
    high: int | None = None
    top: int = MOST
    """The largest batch that may be tried."""
    has_all_data: bool = False
    """Whether `top` is all training samples."""
    stalled: bool = False
    """The last trial left more than half of the bracket."""
    ended: Ending | None = None
    too_slow: int | None = None
    """A batch that was not tried for the time of its trial, or whose trial did not end in time."""

    def record(self, trial: Trial, step: int) -> None:
        """Takes in a trial of a batch inside the bracket; batches are `step` apart."""
        width = None if self.high is None else self.high - self.low
        self.trials[trial.batch] = trial
        if trial.slow:
            self.too_slow, self.ended = trial.batch, "time"
            return
        if trial.samples:
            # A larger batch would hold samples twice.
            all_samples = max(trial.samples // (trial.devices or 1) // step, 1) * step
            self.has_all_data, self.top = all_samples <= self.top, min(self.top, all_samples)
        if trial.fits:
            self.low = trial.batch
        else:
            self.high = trial.batch
        # A half, rounded to a step, does not count as a stall.
        self.stalled = width is not None and 2 * ((self.high or 0) - self.low) > width + 2 * step

    def end(self, step: int, tolerance: float, *, by_speed: bool) -> Ending | None:
        """Why the search is at its end; None where it goes on."""
        low, high = self.low, self.high
        if self.ended:
            return self.ended
        if low >= self.top:
            return "data" if self.has_all_data else "max"
        if low and tolerance and self.trials[low].memory_share >= FILLED:
            return "memory"
        if high is not None:
            # Where speed decides, the last sample that fits is worth no trial.
            is_close = high - low <= max(step, tolerance * low) or (by_speed and low > 0)
            return "memory" if is_close else None
        if not by_speed:
            return None
        line = _linear_limit(self)
        is_full = line is not None and line < LEAST_GROWTH * low
        return "memory" if is_full else None if self._grows() else "speed"

    def _grows(self) -> bool:
        """Whether one of the last two batches that fit is faster than those before, by enough: one
        alone may have been measured while something else ran."""
        fitting = sorted(batch for batch, trial in self.trials.items() if trial.fits)
        speeds = [self.trials[batch].samples_per_second or 0.0 for batch in fitting]
        before, now = speeds[:-2], speeds[-2:]
        return not before or max(now) >= (1 + WORTH_IN_SPEED) * max(before)


def search(
    try_batch: TryBatch,
    settings: SearchSettings,
    tolerance: float | None = None,
    goal: float = 1.0,
    *,
    by_speed: bool = False,
    affordable: Affordable = lambda bracket: math.inf,
) -> Bracket:
    """Tries batches until one fits and the next one (a multiple further on) does not.

    The result's `low` is the largest batch that fits (0: none does); its `high` the smallest that
    does not, None where the search ended for another reason: `ended`.

    tolerance: of trials by the compiler: ends where the largest is known to within this part of it,
        or (but for 0) fills the memory; None: measured trials.
    goal: part of the memory that a compiler's search aims at.
    by_speed: ends where a larger batch is hardly faster.
    affordable: the largest batch whose trial may start.
    """
    step = settings.multiple_of
    bracket = Bracket(top=settings.top)
    batch, reason = _first(settings), "the start"
    while True:
        bracket.record(try_batch(batch, reason), step)
        bracket.ended = bracket.end(step, tolerance or 0.0, by_speed=by_speed)
        if bracket.ended:
            return bracket
        if tolerance is not None:
            guess, reason = _near(bracket, tolerance, goal)
        elif by_speed and bracket.low:
            guess, reason = _twice(bracket)
        elif bracket.high is None:
            guess, reason = _above(bracket, settings)
        else:
            guess, reason = _inside(bracket, step)
        most = min(bracket.top, (bracket.high or math.inf) - step)
        batch = int(min(max(_rounded(guess, step), bracket.low + step), most))
        within = affordable(bracket)
        if batch > within:
            bracket.too_slow, batch = batch, _rounded(within, step)
            reason = "as much as there is time for"
            if batch < max(LEAST_GROWTH * bracket.low, bracket.low + step):
                bracket.ended = "time"
                return bracket


def line_end(bracket: Bracket) -> int | None:
    """The largest batch by the line through what was tried; None where memory is unknown."""
    line = _linear_limit(bracket)
    return int(line) if line is not None and line > bracket.low else None


def _twice(bracket: Bracket) -> tuple[float, Reason]:
    """The next batch where speed decides: no farther than memory says."""
    line = _linear_limit(bracket)
    return min(2 * bracket.low, line or math.inf), "twice as much, as long as that is faster"


def _first(settings: SearchSettings) -> int:
    step, top = settings.multiple_of, settings.top
    if top < step:
        raise ValueError(f"max {settings.max} is below one multiple of {step}")
    return min(max(settings.start // step * step, step), top)


def _near(bracket: Bracket, tolerance: float, goal: float) -> tuple[float, Reason]:
    """The next batch of a search by the compiler."""
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
