"""How long measured trials take: predicted from those before them."""

from __future__ import annotations

import math

from tpukit.probe.batch.trial import Trial

TIMED_STEPS = 3
LONG_ENOUGH_SECONDS = 1.0
"""Of timed steps: the rate is plain, further steps would tell nothing new."""
OTHER_STEPS = 1.5
"""What a trial does beside its timed steps, in their time: a first step, an evaluation, copies."""
CPU_TRIAL_SECONDS, CPU_SEARCH_SECONDS = 120.0, 900.0
"""On a CPU, by default: the longest trial that is started, and the time after which none is."""


def predicted_seconds(known: Trial, batch: int, accumulate: int = 1) -> float:
    """Duration of a trial by one that fits; as long as that where its step was not timed."""
    step = known.step_seconds
    if not step:
        return known.seconds
    longer = step * batch * accumulate / (known.batch * known.accumulate)
    return _besides(known, step) + _steps(longer) * longer


def batch_within(known: Trial, seconds: float) -> float:
    """The largest batch whose trial takes no longer, by one that fits."""
    step = known.step_seconds
    if not step:
        return math.inf if known.seconds <= seconds else 0.0
    longest = (seconds - _besides(known, step)) / (1 + OTHER_STEPS)
    return max(0.0, known.batch * known.accumulate * longest / step)


def _besides(known: Trial, step: float) -> float:
    """Seconds of a trial that do not grow with the batch."""
    return max(0.0, known.seconds - _steps(step) * step)


def _steps(step: float) -> float:
    return min(TIMED_STEPS, math.ceil(LONG_ENOUGH_SECONDS / step)) + OTHER_STEPS
