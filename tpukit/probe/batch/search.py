"""The search for the largest batch that fits.

The search trusts nothing but trials. It keeps a bracket (the largest batch seen to fit, a larger
one seen not to), guesses inside or above it from the memory usage so far, and ends when the two
are neighbours: both were tried. Memory need not grow with the batch, nor grow evenly: a compiler
near the limit trades operations for memory, and what a failure requested goes up and down.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from tpukit.io.ranges import BATCH, DECAY, Range, setting
from tpukit.probe.trial import Trial

SHARE_AFTER_A_WRONG_LINE = 0.8
"""Part of the way to a batch that failed against the line, for the next trial."""
COMPILER_STRETCH = 1.33
"""Factor on the linear guess far from the limit: near it the TPU compiler recomputes, and GPT-2 and
EfficientNet fitted a third more than the line predicts."""
FAR = 0.8
"""Part of the memory below which a batch is far from the limit."""
WORTH_A_JUMP = 1.5
"""Minimum growth factor of a trial within the margin on the way to the largest batch."""
LEAST_GROWTH = 1.2
"""Minimum growth factor of the other jumps."""
FILLED = 0.9
"""Part of the memory that ends a compiler's search, unless a line leads far beyond: a larger batch
is slower, and leaves no margin."""
WORTH_IN_SPEED = 0.1
"""Minimum relative gain in samples a second for which a search by speed goes on."""
MOST, MOST_COMPILED = 4096, 1024
"""Default maximum batch a device: measured, and by the compiler, which takes minutes for a small
model in a batch of thousands."""
TOLERANCE = 0.1
"""Relative precision of a compiler's search, unless it is exact."""
REACHES = "where memory reaches the limit by what was tried"

Ending = Literal["memory", "speed", "time", "data", "max"]
"""Reason for the end of a search: both sides of the largest were tried, or memory is nearly full;
larger batches are hardly faster; they take too long; all training samples fit; the maximum fits.
"""
Reason = str
TryBatch = Callable[[int, Reason], Trial]
"""Tries a batch, and logs the reason."""
Affordable = Callable[["Bracket"], float]
MONTH = Range(1, 30 * 86400, whole=False)
"""Seconds that a limit on time may have."""


@dataclass(frozen=True)
class SearchSettings:
    """Which batches are tried, and which one is recommended.

    The options of `probe-batch` are made from these fields and their docstrings.
    """

    start: int = setting(4, BATCH)
    """First batch a device to try."""
    max: int | None = setting(None, BATCH)
    """Largest batch a device to try (default: 4096; 1024 with --target), of the training samples at
    most."""
    multiple_of: int = setting(1, BATCH)
    """Try multiples of this only."""
    margin: float = setting(0.05, DECAY)
    """Part of the memory that the recommended batch leaves free."""
    global_batch_size: int | None = setting(None, BATCH)
    """Find the gradient accumulation steps that reach this global batch size (default: none)."""
    time_limit: float | None = setting(None, MONTH, unit="DURATION")
    """Time after which a trial is ended (default: 10m on a CPU; 30m where programs compile)."""
    trial_time: float | None = setting(None, MONTH, unit="DURATION")
    """Start no trial that would take longer (default: 2m on a CPU, else the time limit)."""
    max_time: float | None = setting(None, MONTH, unit="DURATION")
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
    """A batch whose trial would have taken too long, or did."""

    def record(self, trial: Trial, step: int) -> None:
        """Adds a trial of a batch inside the bracket; batches are `step` apart."""
        width = None if self.high is None else self.high - self.low
        self.trials[trial.batch] = trial
        if trial.slow:
            self.too_slow, self.top = trial.batch, max(trial.batch - step, step)
            self.ended = "time" if self.low or trial.batch <= step else None
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
        """The reason why the search ends; None where it goes on."""
        low, high = self.low, self.high
        if self.ended:
            return self.ended
        if low >= self.top:
            return "data" if self.has_all_data else "time" if self.too_slow else "max"
        line = _linear_limit(self) or 0.0
        is_full = line < LEAST_GROWTH * low
        if tolerance and is_full and self.trials[low].memory_share >= FILLED:
            return "memory"
        if high is not None:
            # Where speed decides, the last sample that fits is worth no trial.
            is_close = high - low <= max(step, tolerance * low) or (by_speed and low > 0)
            return "memory" if is_close else None
        if not by_speed:
            return None
        return "memory" if line and is_full else None if self._grows() else "speed"

    def _grows(self) -> bool:
        """Whether one of the last two batches that fit is faster than those before, by enough; one
        measurement may have been disturbed."""
        fitting = sorted(batch for batch, trial in self.trials.items() if trial.fits)
        speeds = [self.trials[batch].samples_per_second or 0.0 for batch in fitting]
        before, now = speeds[:-2], speeds[-2:]
        return not before or max(now) >= (1 + WORTH_IN_SPEED) * max(before)


def search(
    try_batch: TryBatch,
    settings: SearchSettings,
    tolerance: float = 0.0,
    goal: float = 1.0,
    *,
    by_speed: bool = False,
    affordable: Affordable = lambda bracket: math.inf,
) -> Bracket:
    """Tries batches until one fits and the next one (a multiple further on) does not.

    The result's `low` is the largest batch that fits (0: none does); its `high` the smallest that
    does not, None where the search ended for another reason: `ended`.

    tolerance: the search ends where the largest batch is known to within this part of it, or (but
        for 0) fills the memory.
    goal: part of the memory to aim at.
    by_speed: the search ends where a larger batch is hardly faster.
    affordable: the largest batch whose trial may start.
    """
    step = settings.multiple_of
    bracket = Bracket(top=settings.top)
    batch = min(max(settings.start // step * step, step), bracket.top)
    reason = "the start"
    while True:
        bracket.record(try_batch(batch, reason), step)
        bracket.ended = bracket.end(step, tolerance, by_speed=by_speed)
        if bracket.ended:
            return bracket
        closeness = max(step, tolerance * bracket.low)
        if bracket.too_slow and not bracket.low:
            guess, reason = float(step), "the smallest, as that took too long"
        elif by_speed and bracket.low:
            line = _linear_limit(bracket) or math.inf
            guess, reason = min(2 * bracket.low, line), "twice as much, as long as that is faster"
        elif bracket.high is None:
            guess, reason = _above(bracket, settings, closeness, goal)
        else:
            guess, reason = _inside(bracket, bracket.high, closeness, goal)
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


def _above(
    bracket: Bracket, settings: SearchSettings, closeness: float, goal: float
) -> tuple[float, Reason]:
    """The next batch where everything so far fits: as far as memory says."""
    low, line = bracket.low, _linear_limit(bracket, goal)
    if line is None:
        return max(2 * low, low + closeness), "memory usage unknown: twice as much"
    if line < low + closeness:
        return low + closeness, f"{low} fits close to the limit: a little more"
    trial = bracket.trials[low]
    if trial.effort is not None:
        return (COMPILER_STRETCH if trial.memory_share < FAR else 1.0) * line, REACHES
    within = _linear_limit(bracket, 1 - settings.margin) or 0.0
    if len(bracket.trials) == 2 and WORTH_A_JUMP * low <= within < line:
        # It may be recommended, and the line through it leads closer to the limit.
        return within, f"leaves {settings.margin:.0%} of the memory free"
    return line, REACHES


def _inside(bracket: Bracket, high: int, closeness: float, goal: float) -> tuple[float, Reason]:
    """The next batch between `low`, which fits, and `high`: by a line, else half way."""
    low = bracket.low
    between = f"between {low}, which fits, and {high}, which does not"
    line = None if bracket.stalled else _linear_limit(bracket, goal)
    if low == 0:
        crossing = None if bracket.stalled else _crossing(bracket, high)
        return crossing or high / 2, f"{high} does not fit: scaled by what it requested"
    if line is None:
        return (low + high) / 2, f"half way {between}"
    if line < low + closeness:
        return low + closeness, f"{low} fits close to the limit: a little more"
    if line < high:
        return line, f"where a line reaches the limit, {between}"
    guess = low + SHARE_AFTER_A_WRONG_LINE * (high - low)
    return guess, f"a little under {high}, which should have fitted"


def _linear_limit(bracket: Bracket, share: float = 1.0) -> float | None:
    """The batch at which a line through those that fit reaches this share of the memory limit, or
    the limit where that is passed."""
    low = bracket.low
    trial = bracket.trials.get(low)
    if trial is None or trial.used_bytes is None or trial.limit_bytes is None:
        return None
    if trial.memory_share >= share:
        share = 1.0
    slope = (trial.used_bytes - (trial.fixed_bytes or 0)) / low
    before = max((b for b, t in bracket.trials.items() if t.fits and b < low), default=None)
    if before is not None and (earlier := bracket.trials[before].used_bytes) is not None:
        # Flatter than the share that grows: the smaller batch's peak was not in its step.
        slope = max(slope, (trial.used_bytes - earlier) / (low - before))
    if slope <= 0:
        return None
    return low + (share * trial.limit_bytes - trial.used_bytes) / slope


def _crossing(bracket: Bracket, high: int) -> float | None:
    """The batch at the limit, by the memory that the failed one requested."""
    failed = bracket.trials[high]
    base, used, limit = failed.fixed_bytes or 0, failed.used_bytes, failed.limit_bytes
    if used is None or limit is None or not base <= limit < used:
        return None
    return (limit - base) / (used - base) * high


def _rounded(batch: float, step: int) -> int:
    return int(batch / step + 1e-9) * step
