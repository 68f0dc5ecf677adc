"""Which images of a data set without a validation part are for validation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tpukit.errors import DataError

SPLIT_SEED = 0


def of_fold(table: Path, column: str, values: Sequence[str], fold: str) -> set[int]:
    """The rows whose value in a table's column is `fold`.

    Raises DataError where none has it, or every row.
    """
    chosen = {place for place, value in enumerate(values) if value == fold}
    if len(chosen) in (0, len(values)):
        there = ", ".join(sorted({*values})[:10])
        many = "every" if chosen else "no"
        raise DataError(
            f"{table}: {many} row has {fold!r} in the column {column!r}.",
            f"Its values are {there}: --set fold=VALUE names those to validate on.",
        )
    return chosen


def stratified(labels: Sequence[int], fraction: float) -> set[int]:
    """A fraction of each class, at least one of those with several images."""
    array = np.array(labels)
    chosen: set[int] = set()
    for label in np.unique(array).tolist():
        places = np.flatnonzero(array == label)
        order = np.random.default_rng([SPLIT_SEED, label]).permutation(places)
        count = round(fraction * len(places)) or int(fraction > 0 and len(places) > 1)
        chosen.update(order[:count].tolist())
    return chosen


def stratified_groups(labels: Sequence[int], groups: Sequence[str], fraction: float) -> set[int]:
    """Whole groups that make up about a fraction of each class.

    In a drawn order each group is taken that brings the counts of the classes closer to the
    fraction (squared distance); where none does, the one that leaves them closest.
    """
    names, of_image = np.unique(np.array(groups), return_inverse=True)
    array = np.array(labels)
    order = np.random.default_rng(SPLIT_SEED).permutation(len(names))
    by_group = np.split(np.argsort(of_image, kind="stable"), np.cumsum(np.bincount(of_image))[:-1])
    missing = fraction * np.bincount(array).astype(float)
    start, taken = missing.copy(), []
    for group in order.tolist():
        counts = np.bincount(array[by_group[group]], minlength=len(missing))
        if _grown(counts, missing) < 0:
            missing -= counts
            taken.append(group)
    if not taken and fraction > 0 and len(names) > 1:
        alone = [_grown(np.bincount(array[g], minlength=len(start)), start) for g in by_group]
        taken = [int(np.argmin(alone))]
    return {place for group in taken for place in by_group[group].tolist()}


def _grown(counts: NDArray[np.int64], missing: NDArray[np.float64]) -> float:
    """By how much the squared distance to what is missing grows with these images."""
    return float((counts * (counts - 2 * missing)).sum())
