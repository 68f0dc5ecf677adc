"""When things are due and how fast to learn: pure functions of the step."""

from __future__ import annotations

import math
from fractions import Fraction

from tpukit.train.config import TrainConfig

FEWEST_STEPS = 5
"""Minimum number of steps between two validations at the end of a pass."""


def learning_rate(step: int, total_steps: int, config: TrainConfig) -> float:
    """The rate of optimizer step `step` (from 0) out of `total_steps`.

    Linear warm-up to the peak, then constant, or linear or cosine down to
    `final_lr_fraction` of the peak at the last step (cosine: Loshchilov and Hutter, 2017).
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return config.lr
    span = max(1, total_steps - 1 - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / span)
    if config.schedule == "cosine":
        progress = 0.5 * (1 - math.cos(math.pi * progress))
    return config.lr * (1 - progress * (1 - config.final_lr_fraction))


def completes_pass(done: int, steps_per_pass: Fraction) -> bool:
    """Whether step `done` (from 1) completed a pass over the data, or enough short ones."""
    passes = math.ceil(FEWEST_STEPS / steps_per_pass)
    span = passes * steps_per_pass
    return done // span > (done - 1) // span


def is_due(done: int, every: int, total: int) -> bool:
    """Whether something that happens every `every` steps, and after the last, is due now.

    `done` counts finished steps.
    """
    return done > 0 and (done % every == 0 or done == total)
