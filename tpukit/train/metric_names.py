"""Names of metrics, and which way is better: read before anything is opened."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tpukit.errors import ConfigError

LARGEST = (
    "accuracy", "balanced_accuracy", "f1", "macro_f1", "micro_f1", "weighted_f1", "precision",
    "macro_precision", "recall", "macro_recall", "mcc", "kappa", "qwk", "quadratic_kappa", "auc",
    "roc_auc", "average_precision", "lrap", "r2", "pearson", "spearman",
)  # fmt: skip
"""Metrics of which more is better."""
LEAST = ("log_loss", "rmse", "mse", "mae", "median_ae", "rmsle", "mape")
"""Metrics of which less is better."""
RANKED = re.compile(r"(map|top)@([1-9]\d*)")
"""Metrics of the first places of a ranking: `map@3`, `top@5`."""
OWN = re.compile(r"(?:(min|max):)?(.+):([A-Za-z_]\w*)")
"""A user's function: `max:my_metrics.py:gini`, or `max:package.module:gini`."""
TITLES: Mapping[str, str] = {
    **{name: f"{name} ↑" for name in LARGEST},
    **{name: f"{name} ↓" for name in LEAST},
}
"""Metric -> its name in tables."""


@dataclass(frozen=True)
class MetricName:
    """A metric that was asked for."""

    name: str
    """Its name in results."""
    largest: bool
    """Whether more of it is better."""
    place: str | None = None
    """File or module of a user's function."""


def parse_metrics(text: str | None) -> list[MetricName]:
    """The metrics of `--metric`, separated by commas. Raises ConfigError for one that is unknown
    or whose direction is."""
    return [_parsed(part.strip()) for part in (text or "").split(",") if part.strip()]


def _parsed(text: str) -> MetricName:
    way, _, name = text.rpartition(":") if text[:4] in ("min:", "max:") else ("", "", text)
    if name in LEAST or name in LARGEST or RANKED.fullmatch(name):
        better = "min" if name in LEAST else "max"
        if way not in ("", better):
            raise ConfigError(
                f"--metric {text}: of {name} the {'least' if better == 'min' else 'most'} is the"
                " best.",
                f"Use --metric {name}",
            )
        return MetricName(name, better == "max")
    own = OWN.fullmatch(text)
    if own is None or own[2] in ("min", "max"):
        raise ConfigError(
            f"--metric: there is no {name!r}; there are {', '.join((*LARGEST, *LEAST))}, map@K and"
            " top@K.",
            "A function of your own is named with its direction: max:my_metrics.py:FUNCTION.",
        )
    if own[1] is None:
        raise ConfigError(
            f"--metric {text}: whether more of it is better is not known.",
            f"Write max:{text}, or min:{text} where less is.",
        )
    return MetricName(own[3], own[1] == "max", own[2])


def with_whole_paths(text: str) -> str:
    """`--metric` as a run records it: files of functions by their whole path."""
    parts = []
    for part in map(str.strip, text.split(",")):
        own = OWN.fullmatch(part)
        is_file = own is not None and own[2].endswith(".py")
        parts.append(f"{own[1]}:{Path(own[2]).resolve()}:{own[3]}" if own and is_file else part)
    return ",".join(parts)
