"""The validation metric that decides the best checkpoint, and when training stops early."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from tpukit.errors import UsageError

METRIC = re.compile(r"(?:(min|max):)?(valid_\w+)")
"""`valid_loss`, `min:valid_loss` or `max:valid_auc`."""


@dataclass(frozen=True)
class BestMetric:
    """A validation metric and whether more of it is better."""

    name: str
    largest: bool = False

    @property
    def key(self) -> str:
        """Its name in `best`: `loss` for `valid_loss`."""
        return self.name.removeprefix("valid_")

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


def parse_best_metric(text: str) -> BestMetric | None:
    """`NAME`, `min:NAME` or `max:NAME`, of a metric whose name begins with valid_; else None."""
    match = METRIC.fullmatch(text)
    return BestMetric(match[2], match[1] == "max") if match else None


def stops_early(patience: int | None, since_best: int) -> bool:
    """Whether `since_best` validations without a better metric end a run."""
    return bool(patience) and since_best >= (patience or 0)
