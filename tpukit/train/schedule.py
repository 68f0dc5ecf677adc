"""When things are due and how fast to learn: pure functions of the step."""

from __future__ import annotations

import math

from tpukit.train.config import TrainConfig


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


def is_due(done: int, every: int, total: int) -> bool:
    """Whether something that happens every `every` steps, and after the last, is due now.

    `done` counts finished steps.
    """
    return done > 0 and (done % every == 0 or done == total)
