"""When things are due, how fast to learn, what is best: pure functions of step and metrics."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from tpukit.errors import ConfigError, UsageError
from tpukit.train.config import METRIC, TrainConfig

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


# -- the best checkpoint -------------------------------------------------------------------------
@dataclass(frozen=True)
class BestMetric:
    """A validation metric and whether more of it is better."""

    name: str
    largest: bool = False

    @property
    def key(self) -> str:
        """Its name in `best`: `loss` for `valid_loss`."""
        return self.name.removeprefix("valid_")

    def is_best(self, scores: Mapping[str, float], best: Mapping[str, float]) -> bool:
        """Whether no earlier scores are better: of equal ones the later weights are kept."""
        return self.improves(scores, best) or scores.get(self.name) == best.get(self.key, math.nan)

    def improves(self, scores: Mapping[str, float], best: Mapping[str, float]) -> bool:
        """Whether these scores are better than the best so far."""
        found = scores.get(self.name, math.nan)
        before = best.get(self.key, -math.inf if self.largest else math.inf)
        return found > before if self.largest else found < before

    def require_among(self, scores: Mapping[str, float]) -> None:
        """Raises UsageError where validation did not give this metric."""
        if scores and self.name not in scores:
            raise UsageError(
                f"best_metric {self.name!r} is not among the validation metrics:"
                f" {', '.join(scores)}.",
                "Name one of these with --set best_metric=NAME (max:NAME where more is better).",
            )

    def describe(self, best: Mapping[str, float]) -> str:
        """`valid_loss 0.31 of step 400`."""
        if self.key not in best:
            return f"{self.name} (never finite)"
        return f"{self.name} {best[self.key]:.4g} of step {best['step']:.0f}"


def parse_best_metric(text: str, titles: Mapping[str, str] | None = None) -> BestMetric | None:
    """`NAME`, `min:NAME` or `max:NAME`, of a metric whose name begins with valid_; else None.

    titles: metric -> its name in tables, whose arrow says which way is better: NAME alone takes it.

    Raises ConfigError for the other way.
    """
    match = METRIC.fullmatch(text)
    if match is None:
        return None
    way, name = match.groups()
    title = (titles or {}).get(name, "")
    declared = {"↑": "max", "↓": "min"}.get(title[-1:])
    if way and declared and way != declared:
        raise ConfigError(
            f"best_metric {text!r}: of {title!r} the {'most' if declared == 'max' else 'least'} is"
            " the best.",
            f"Use --set best_metric={declared}:{name}",
        )
    return BestMetric(name, (way or declared) == "max")
