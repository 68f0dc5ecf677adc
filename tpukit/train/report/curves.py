"""The curves of a run: series thinned to what a screen shows, and the charts they stand in."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tpukit.io.json_lines import NewLines
from tpukit.io.secrets import without_secrets
from tpukit.io.units import GIB
from tpukit.train.run_log import metric_rows

MOST_POINTS = 1000
"""Maximum points of one series; even, so that halving leaves full points."""

Point = tuple[int, float, float, float]
"""Step and value of its last row, least and largest value of its rows."""


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
        for row in metric_rows(self._lines):
            group = {"train": self.train, "valid": self.valid}.get(row["kind"])
            if group is None:
                continue
            step = row["step"]
            for name, value in row.items():
                if isinstance(value, int | float) and name != "step" and math.isfinite(value):
                    if name not in group:
                        group[name] = Series()
                    group[name].add(step, value)
                    if name == "samples_per_second" and value > 0:
                        self._rate(step, value)


# -- charts --------------------------------------------------------------------------------------
MOST_CHARTS = 100
ALL_POINTS = 30_000
"""Maximum points of all charts together; they decide the size of the page."""

ENGINE = {
    "Rate": ("samples/s", {"samples_per_second": "rate"}),
    "Use of the time": (
        "",
        {"mfu": "MFU", "data_waiting": "waiting for data", "host_busy": "host"},
    ),
    "Memory": ("GiB", {"memory_used": "used", "memory_peak": "peak"}),
    "Compilations": ("", {"compilations": "compilations"}),
    "Learning rate": ("", {"lr": "learning rate"}),
    "Gradient norm": ("", {"gradient_norm": "last", "largest_gradient_norm": "largest"}),
    "Skipped steps": ("", {"skipped_steps": "skipped steps"}),
}
"""What the engine logs beside a task's metrics: title -> unit, names and labels."""
_SMOOTHED = {"samples_per_second", "gradient_norm"}
_FROM_ZERO = {"Rate", "Use of the time", "Memory", "Compilations", "Learning rate", "Skipped steps"}
_SHOWN_ABOVE_ZERO = {"Compilations", "Skipped steps"}
"""Charts that say nothing where all values are zero."""
_DASHED = {"memory_peak", "largest_gradient_norm"}
"""Series drawn above the others, which would hide them where both are equal."""


def charts_of(metrics: MetricSeries) -> list[dict[str, Any]]:
    """The charts as JSON: `title`, `unit`, `log` (scale at first), `zero` (the axis begins there),
    `series`."""
    found = [*_task_charts(metrics), *_engine_charts(metrics.train)][:MOST_CHARTS]
    share = ALL_POINTS // max(1, sum(len(chart["series"]) for chart in found))
    for chart in found:
        for series in chart["series"]:
            series["points"] = series["points"].thinned(share)
    return found


def _task_charts(metrics: MetricSeries) -> Iterator[dict[str, Any]]:
    """A chart for each metric of the task, training and validation together; the loss first."""
    engines = {name for _, names in ENGINE.values() for name in names}
    own = [name for name in metrics.train if name not in engines]
    beside = {name: _training_name(name, own) for name in metrics.valid}
    for name in sorted({*own, *beside.values()}, key=lambda n: (n != "loss", n)):
        trained = {"training": metrics.train[name]} if name in own else {}
        valid = {_valid_label(v, name): metrics.valid[v] for v, n in beside.items() if n == name}
        # A loss over decades reads better on a logarithmic scale.
        points = [p for s in (trained | valid).values() for p in s.points] if name == "loss" else []
        low, high = min((p[2] for p in points), default=0), max((p[3] for p in points), default=0)
        lines = [_line(label, series, smooth=True) for label, series in trained.items()]
        lines += [_line(label, series) for label, series in valid.items()]
        yield _chart(name, "", lines, log=0 < low * 10 < high)


def _training_name(valid: str, own: list[str]) -> str:
    """`loss` of `valid_loss` and `valid_NAME_loss`; what training does not log stays itself."""
    plain = valid.removeprefix("valid_")
    matching = [name for name in own if plain == name or plain.endswith(f"_{name}")]
    return max(matching, key=len, default=plain)


def _valid_label(valid: str, name: str) -> str:
    data = valid.removeprefix("valid_").removesuffix(name).strip("_")
    return f"validation, {data}" if data else "validation"


def _engine_charts(train: Mapping[str, Series]) -> Iterator[dict[str, Any]]:
    for title, (unit, names) in ENGINE.items():
        found = {name: train[name] for name in names if name in train}
        if not found or (
            title in _SHOWN_ABOVE_ZERO and not any(p[3] for s in found.values() for p in s.points)
        ):
            continue
        scale = 1 / GIB if unit == "GiB" else 1.0
        lines = [_line(names[n], _scaled(s, scale), smooth=n in _SMOOTHED, dashed=n in _DASHED)
                 for n, s in found.items()]  # fmt: skip
        yield _chart(title, unit, lines, zero=title in _FROM_ZERO)


def _scaled(series: Series, scale: float) -> Series:
    scaled = Series()
    scaled.points = [(p[0], p[1] * scale, p[2] * scale, p[3] * scale) for p in series.points]
    return scaled


def _line(
    label: str, series: Series, *, smooth: bool = False, dashed: bool = False
) -> dict[str, Any]:
    shown = without_secrets(label)
    return {"label": shown, "smooth": smooth, "dashed": dashed, "points": series}


def _chart(
    title: str, unit: str, series: list[dict[str, Any]], *, log: bool = False, zero: bool = False
) -> dict[str, Any]:
    shown = without_secrets(title.replace("_", " "))
    named = shown[:1].upper() + shown[1:]
    return {"title": named, "unit": unit, "log": log, "zero": zero, "series": series}
