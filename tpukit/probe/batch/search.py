"""Finding the largest batch that fits, whoever answers whether one does.

The search trusts nothing but trials. It keeps a bracket (the largest batch seen to fit, a larger
one seen not to), guesses inside or above it from the memory read so far, and ends when the two
are neighbours: both were tried. Memory need not grow with the batch, nor grow evenly: a compiler
near the limit trades operations for memory, and what a failure says it wanted goes up and down.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

Reason = str


@dataclass(frozen=True)
class Reading:
    """The answer to one question: does this batch fit, and how much does it use?"""

    fits: bool
    used_bytes: int | None = None
    """What it uses, or wanted; None where nothing was said (killed, hung)."""
    limit_bytes: int | None = None
    fixed_bytes: int | None = None
    """The part that does not grow with the batch: parameters, optimizer, EMA, and where it was
    measured, what libraries and the run itself hold."""


FARTHEST_JUMP = 64
"""Times the batch that fits. Too far costs a failure, which is quicker than a trial that fits."""

SHARE_AFTER_A_WRONG_LINE = 0.8
"""Of the way to a guess that failed: a tenth too much was seen where 65 rows told of 228."""
CLOSE = 8
"""Multiples: a bracket so narrow is halved."""

Question = Callable[[int, Reason], Reading]
"""Tries a batch; the reason is for people who watch."""


@dataclass(frozen=True)
class SearchSettings:
    """Where to look."""

    start: int = 4
    """The first batch to try, rounded down to a multiple of `multiple` (but at least that)."""
    maximum: int = 4096
    """No larger batch is tried."""
    multiple: int = 1
    """Only multiples of this are tried."""
    stretch: float = 1.0
    """How far beyond the linear guess the first jump goes; over 1 where the answerer saves memory
    when it must (the TPU compiler recomputes: 1.33 was seen)."""


@dataclass
class Bracket:
    """What is known: `low` fits, `high` does not; 0 and None where nothing was seen yet."""

    readings: dict[int, Reading] = field(default_factory=dict)
    low: int = 0
    high: int | None = None
    stalled: bool = False
    """The last answer left more than half of the bracket."""

    def record(self, batch: int, reading: Reading, step: int) -> None:
        """Takes in one answer for a batch inside the bracket; batches are `step` apart."""
        width = None if self.high is None else self.high - self.low
        self.readings[batch] = reading
        if reading.fits:
            self.low = batch
        else:
            self.high = batch
        # A half, rounded to a step, is no stall.
        self.stalled = width is not None and 2 * ((self.high or 0) - self.low) > width + 2 * step


@dataclass(frozen=True)
class Found:
    """The end of a search."""

    largest: int
    """The largest batch that was tried and fits with its neighbour not fitting; 0 if none does."""
    next_failed: int | None
    """The next batch, tried and too large; None where `maximum` was reached."""
    trials: tuple[int, ...]


def search(question: Question, settings: SearchSettings, *, settle: bool = False) -> Found:
    """Asks until a batch fits and the next one (a multiple further on) does not, both tried.

    settle: stops where the very next batch is to be asked, for a search that goes on from there
    with a better question and asks that one anyway.
    """
    step = settings.multiple
    top = settings.maximum // step * step
    if top < step:
        raise ValueError(f"maximum {settings.maximum} is under one multiple of {step}")
    bracket = Bracket()
    batch, reason = min(max(settings.start // step * step, step), top), "the start"
    jumps = 0
    while True:
        bracket.record(batch, question(batch, reason), step)
        if _finished(bracket, step, top):
            trials = tuple(bracket.readings)
            return Found(bracket.low, bracket.high, trials)
        jumps += 1
        if bracket.high is None:
            batch, reason = _above(bracket, settings, jumps)
            batch = min(batch, top)
        else:
            batch, reason = _inside(bracket, step)
        if settle and bracket.low and batch == bracket.low + step:
            return Found(bracket.low, None, tuple(bracket.readings))


def _finished(bracket: Bracket, step: int, top: int) -> bool:
    if bracket.high is None:
        return bracket.low >= top
    return bracket.high - bracket.low <= step


def _above(bracket: Bracket, settings: SearchSettings, jumps: int) -> tuple[int, Reason]:
    """The next batch where everything so far fits: as far as memory says, at least galloping."""
    step, low = settings.multiple, bracket.low
    gallop = low + step * 2 ** max(jumps - 2, 0)
    guess = _linear_limit(bracket, settings.stretch if jumps == 1 else 1.0)
    if guess is None:
        return _rounded(max(2 * low, gallop), step), "no memory figure to go by: twice as much"
    reach = FARTHEST_JUMP * low
    batch = _rounded(min(guess, reach), step)
    if batch < gallop:
        return gallop, f"{low} fits close to the limit: a little more"
    return batch, "where the memory read so far reaches the limit"


def _linear_limit(bracket: Bracket, stretch: float) -> float | None:
    """The batch at which memory, drawn as a line through those that fit, reaches the limit."""
    low = bracket.low
    reading = bracket.readings[low]
    if reading.used_bytes is None or reading.limit_bytes is None:
        return None
    slope = (reading.used_bytes - (reading.fixed_bytes or 0)) / low
    before = _previous_fit(bracket)
    if before is not None:
        earlier = bracket.readings[before].used_bytes
        line = 0.0 if earlier is None else (reading.used_bytes - earlier) / (low - before)
        # Much flatter than the share that grows: the smaller batch's peak was not in its step.
        slope = line if line > slope / 2 else slope
    if slope <= 0:
        return None
    return stretch * (low + (reading.limit_bytes - reading.used_bytes) / slope)


def _previous_fit(bracket: Bracket) -> int | None:
    fits = sorted(b for b, r in bracket.readings.items() if r.fits and b < bracket.low)
    return fits[-1] if fits else None


def _inside(bracket: Bracket, step: int) -> tuple[int, Reason]:
    """The next batch strictly between `low` and `high`.

    Where memory reaches the limit; near `high` where memory says that it fits; else half way.
    """
    low, high = bracket.low, bracket.high
    assert high is not None
    if bracket.stalled and _is_at_the_limit(bracket, step):
        return low + step, f"{low} fits close to the limit: a little more"
    guess = None if bracket.stalled else _crossing(bracket, high) or _line_inside(bracket, high)
    reason = f"between {low}, which fits, and {high}, which does not"
    if guess is None and _line_was_wrong(bracket, high) and high - low > CLOSE * step:
        guess = low + SHARE_AFTER_A_WRONG_LINE * (high - low)
        reason = f"a little under {high}, which should have fitted"
    elif guess is None:
        guess, reason = _middle(low, high), f"half way {reason}"
    elif low == 0:
        reason = f"{high} does not fit: scaled by what it wanted"
    return min(max(_rounded(guess, step), low + step), high - step), reason


def _line_inside(bracket: Bracket, high: int) -> float | None:
    """Where the line through what fits reaches the limit, if that is within the bracket."""
    guess = _linear_limit(bracket, 1.0) if bracket.low else None
    return guess if guess is not None and bracket.low < guess < high else None


def _is_at_the_limit(bracket: Bracket, step: int) -> bool:
    """Whether memory says that the next batch is too much; not asked of each neighbour in turn."""
    guess, before = _linear_limit(bracket, 1.0) if bracket.low else None, _previous_fit(bracket)
    if guess is None or before is None:
        return False
    return guess < bracket.low + step and bracket.low - before > step


def _line_was_wrong(bracket: Bracket, high: int) -> bool:
    """Whether memory says that `high` fits: it does not, so the truth is probably near."""
    guess = _linear_limit(bracket, 1.0) if bracket.low and not bracket.stalled else None
    return guess is not None and guess >= high


def _middle(low: int, high: int) -> float:
    """Half way; on a scale of factors where the two are far apart."""
    return math.sqrt(low * high) if 0 < 4 * low < high else (low + high) / 2


def _crossing(bracket: Bracket, high: int) -> float | None:
    """Where a line between the two ends of the bracket crosses the limit."""
    above = bracket.readings[high]
    if above.used_bytes is None or above.limit_bytes is None:
        return None
    below = bracket.readings.get(bracket.low)
    base = below.used_bytes if below else (above.fixed_bytes or 0)
    if base is None or not base <= above.limit_bytes < above.used_bytes:
        return None
    share = (above.limit_bytes - base) / (above.used_bytes - base)
    return bracket.low + share * (high - bracket.low)


def _rounded(batch: float, step: int) -> int:
    return int(batch / step + 1e-9) * step
