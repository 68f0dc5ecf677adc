"""The charts of a run: which series are shown together, in which unit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tpukit.io.secrets import without_secrets
from tpukit.io.units import GIB
from tpukit.train.report.series import MetricSeries, Series

MOST_CHARTS = 100
ALL_POINTS = 30_000
"""Maximum points of all charts together; they decide the size of the page."""

ENGINE = {
    "Rate": ("samples/s", {"samples_per_second": "rate"}),
    "Use of the time": ("", {"mfu": "MFU", "data_waiting": "waiting for data"}),
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
        if not found or (title in _SHOWN_ABOVE_ZERO and all(map(_is_zero, found.values()))):
            continue
        scale = 1 / GIB if unit == "GiB" else 1.0
        lines = [_line(names[n], _scaled(s, scale), smooth=n in _SMOOTHED, dashed=n in _DASHED)
                 for n, s in found.items()]  # fmt: skip
        yield _chart(title, unit, lines, zero=title in _FROM_ZERO)


def _is_zero(series: Series) -> bool:
    return all(point[3] == 0 for point in series.points)


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
