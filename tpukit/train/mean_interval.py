"""The 95 % confidence interval of a metric's mean over samples."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray


def mean_interval(
    values: NDArray[np.floating[Any]], low: float = -math.inf, high: float = math.inf
) -> list[float] | None:
    """The mean's 95 % interval by Student's t, of independent samples (n,); None for one sample.

    `low` and `high` are the ends of the metric's range. The mean lies within them, so the interval
    is cut there: it covers the mean as often as before.
    """
    from scipy.stats import t as student

    count, mean = len(values), float(np.mean(values))
    if count < 2:
        return None
    half = float(student.ppf(0.975, count - 1) * np.std(values, ddof=1) / math.sqrt(count))
    return [max(low, mean - half), min(high, mean + half)]
