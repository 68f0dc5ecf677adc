"""Metrics over the steps of a run, thinned to what a screen shows."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

MOST_POINTS = 1000
"""Maximum points of one series; even, so that halving leaves full points."""

Point = tuple[int, float, float, float]
"""Step and value of its last row, least and largest value of its rows."""


class NewLines:
    """The whole lines that a growing file gained since it was last read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def __iter__(self) -> Iterator[str]:
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                yield line.decode(errors="replace")


class Series:
    """A metric over the steps: at most MOST_POINTS points, which keep minima and maxima."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self._rows_per_point = 1
        self._rows_of_last = 1

    def add(self, step: int, value: float) -> None:
        """Adds a row; rows come in the order of their steps."""
        if self.points and self._rows_of_last < self._rows_per_point:
            _, _, low, high = self.points[-1]
            self.points[-1] = (step, value, min(low, value), max(high, value))
            self._rows_of_last += 1
            return
        if len(self.points) == MOST_POINTS:
            self.points = halved(self.points)
            self._rows_per_point *= 2
        self.points.append((step, value, value, value))
        self._rows_of_last = 1

    def cut(self, step: int) -> None:
        """Drops what lies after `step`: a resumed run does it again."""
        self.points = [point for point in self.points if point[0] <= step]

    def thinned(self, most: int) -> list[list[float]]:
        """Points as JSON, at most `most`: [step, value], with the rows' extremes if they differ."""
        points = self.points
        while len(points) > most:
            points = halved(points)
        return [
            [step, _short(value)] if low == high else [step, *map(_short, (value, low, high))]
            for step, value, low, high in points
        ]


def halved(points: list[Point]) -> list[Point]:
    """Pairs of points as one; an odd last one stays."""
    pairs = zip(points[::2], points[1::2], strict=False)
    merged = [(b[0], b[1], min(a[2], b[2]), max(a[3], b[3])) for a, b in pairs]
    return merged + points[len(merged) * 2 :]


def _short(value: float) -> float:
    return float(f"{value:.5g}")


class MetricSeries:
    """The series of a metrics.jsonl by name; those of the training and of validation apart."""

    def __init__(self, path: Path) -> None:
        self.train: dict[str, Series] = {}
        self.valid: dict[str, Series] = {}
        self._lines = NewLines(path)
        self._rated_step = self._steps = 0
        self._step_seconds = 0.0

    @property
    def mean_rate(self) -> float:
        """Samples a second over all intervals between log lines, compilation left out; 0: none."""
        return self._steps / self._step_seconds if self._step_seconds else 0.0

    def _rate(self, step: int, rate: float) -> None:
        """Takes in the interval that ends with this step."""
        steps = max(0, step - self._rated_step)
        self._rated_step = step
        self._steps += steps
        self._step_seconds += steps / rate

    def read(self) -> None:
        """Takes in the lines written since the last call; damaged ones are left out."""
        for line in self._lines:
            try:
                row = json.loads(line)
                group = {"train": self.train, "valid": self.valid}[row["kind"]]
                step = int(row["step"])
            except (ValueError, KeyError, TypeError, RecursionError):
                continue
            for name, value in row.items():
                if isinstance(value, int | float) and name != "step" and math.isfinite(value):
                    if name not in group:
                        group[name] = Series()
                    group[name].add(step, value)
                    if name == "samples_per_second" and value > 0:
                        self._rate(step, value)
