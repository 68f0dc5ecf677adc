"""What `tpukit test` found of a run as a table of metrics, for text, notebook and page."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tpukit.train.metric_names import TITLES

METRIC_NAMES = {"loss": "loss ↓", **TITLES}
"""Name in JSON -> name in tables, of metrics that any task has; see `Task.metric_names`."""


@dataclass(frozen=True)
class MetricCell:
    """A metric of one way."""

    value: float | None
    interval: list[float] | None = None
    is_best: bool = False
    """Whether no other way in its row has a better value."""


@dataclass(frozen=True)
class MetricTable:
    """A row a metric, a column a way to compute the result."""

    ways: list[str]
    rows: dict[str, list[MetricCell]]


def number_text(value: float) -> str:
    """`1,200`, `0.4100`, `1.234e-05`."""
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:#.4g}"


def metric_table(test: Mapping[str, Any]) -> MetricTable:
    """The table of a test's JSON fields: each metric with its values in other ways beside it.

    `rouge1_baseline` is `rouge1` in another way where other metrics have a `_baseline` too;
    `rouge1_low` and `rouge1_high` are its interval. `methods` names the ways by their suffix,
    `metric_names` the metrics.
    """
    metrics = {name: v for name, v in _entries(test, "metrics") if _is_number(v)}
    intervals = {name: v for name, v in _entries(test, "intervals") if _is_interval(v)}
    for name in [n for n in metrics if {f"{n}_low", f"{n}_high"} <= metrics.keys()]:
        intervals[name] = [metrics.pop(f"{name}_low"), metrics.pop(f"{name}_high")]
    parts = {name: name.rpartition("_") for name in metrics}
    suffixes = [suffix for base, _, suffix in parts.values() if base in metrics]
    ways = [w for w in dict.fromkeys(suffixes) if w == "baseline" or suffixes.count(w) > 1]
    rows, titles = {}, {**METRIC_NAMES, **dict(_entries(test, "metric_names"))}
    for name in metrics:
        base, _, suffix = parts[name]
        if not (base in metrics and suffix in ways):
            names = [name, *(f"{name}_{way}" for way in ways)]
            title = titles.get(name, name)
            rows[title] = _cells(title, [(metrics.get(n), intervals.get(n)) for n in names])
    named = {"": "this run", **{way: str(title) for way, title in _entries(test, "methods")}}
    return MetricTable([named.get(way, way) for way in ("", *ways)], rows)


def metric_lines(test: Mapping[str, Any]) -> Iterator[str]:
    """The table for a terminal of any width: a line a value; nothing where there is one way."""
    table = metric_table(test)
    if len(table.ways) < 2:
        return
    name_width, way_width = max(map(len, table.rows)), max(map(len, table.ways))
    yield "Mean over samples [95 % interval], * best:"
    for name, cells in table.rows.items():
        shown = name
        for way, cell in zip(table.ways, cells, strict=True):
            if cell.value is not None:
                text = f"{cell_text(cell)} *" if cell.is_best else cell_text(cell)
                yield f"  {shown:{name_width}}  {way:{way_width}}  {text}"
                shown = ""


def cell_text(cell: MetricCell) -> str:
    """`0.6630 [0.5600, 0.7650]`; nothing where there is no value."""
    if cell.value is None:
        return ""
    ends = ", ".join(map(number_text, cell.interval or ()))
    return number_text(cell.value) + (f" [{ends}]" if ends else "")


def _cells(title: str, found: list[tuple[float | None, list[float] | None]]) -> list[MetricCell]:
    values = [value for value, _ in found if value is not None]
    best = {"↑": max, "↓": min}.get(title[-1:])
    target = best(values) if best and len(values) > 1 else None
    return [MetricCell(value, ends, value is not None and value == target) for value, ends in found]


def _entries(test: Mapping[str, Any], name: str) -> Iterable[tuple[str, Any]]:
    found = test.get(name)
    return found.items() if isinstance(found, Mapping) else ()


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_interval(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_number, value))
