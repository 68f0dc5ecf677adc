"""Results in a notebook's cell: tables and pictures."""

from __future__ import annotations

import csv
import html
import io
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tpukit.io.units import GIB, format_bytes

Table = list[list[str]]

WAYS = ("baseline", "single", "noser", "lead", "nearest")
"""Suffixes of a metric's name in the JSON of `test`: the same metric of another method."""
HIDDEN = {
    *("command", "compiles", "data", "devices", "exact", "largest_global_batch", "limit_bytes"),
    *("parameters", "path", "per_sample", "picture", "predictions", "seconds", "target", "task"),
}
"""Fields that the command's lines say, or whose files are shown."""
PREVIEWED_ROWS = 3
PREVIEWED_CHARACTERS = 80


def notebook_display() -> Any:
    """`IPython.display` where pictures can be shown: in a notebook's kernel; else None."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if shell is None or not hasattr(shell, "kernel"):
        return None
    from IPython import display

    return display


def show_result(display: Any, fields: Mapping[str, Any]) -> None:
    """Shows what a command's JSON fields hold: tables, and the pictures that they name."""
    for table in result_tables(fields):
        show_table(display, table)
    for picture in result_pictures(fields):
        show_picture(display, picture)


def show_table(display: Any, table: Table) -> None:
    """A table whose first column names its rows; as text where HTML is not shown."""
    cells = [[html.escape(cell) for cell in row] for row in table]
    rows = "".join(
        f"<tr><th style='text-align:left'>{name}</th>"
        + "".join(f"<td style='text-align:left'>{value}</td>" for value in values)
        + "</tr>"
        for name, *values in cells
    )
    text = "\n".join("  ".join(row) for row in table)
    display.display({"text/html": f"<table>{rows}</table>", "text/plain": text}, raw=True)


def show_picture(display: Any, png: bytes) -> None:
    """A PNG picture below the cell."""
    display.display(display.Image(data=png, format="png"))


# -- tables ----------------------------------------------------------------------------------------
def result_tables(fields: Mapping[str, Any]) -> Iterator[Table]:
    """Plain fields; metrics, beside those of other methods; the first rows of a CSV file."""
    best = fields.get("best")
    named = {f"best {n}": v for n, v in best.items()} if isinstance(best, Mapping) else {}
    shown = {n: v for n, v in {**fields, **named}.items() if n not in HIDDEN}
    plain = {n: v for n, v in shown.items() if isinstance(v, str | int | float)}
    if len(plain) > 1:
        yield [[name.replace("_", " "), _text(name, value)] for name, value in plain.items()]
    if metrics := fields.get("metrics"):
        yield metrics_table(metrics, fields.get("intervals") or {})
    path = Path(str(fields.get("path", "")))
    if path.suffix == ".csv" and path.is_file():
        yield _first_rows(path)


def metrics_table(metrics: Mapping[str, Any], intervals: Mapping[str, Sequence[float]]) -> Table:
    """A row a metric, a column a method: `rmse_baseline` stands beside `rmse`.

    Intervals are given by name, or as further metrics: `rouge1_low` and `rouge1_high`.
    """
    bounded = [n for n in metrics if f"{n}_low" in metrics and f"{n}_high" in metrics]
    ends = {n: [metrics[f"{n}_low"], metrics[f"{n}_high"]] for n in bounded}
    intervals = {**ends, **intervals}
    ways = [way for way in WAYS if any(name.endswith(f"_{way}") for name in metrics)]
    own = [n for n in metrics if not n.endswith(("_low", "_high", *(f"_{way}" for way in ways)))]
    columns = ["", *(f"_{way}" for way in ways)]
    rows = [[n, *(_metric(f"{n}{way}", metrics, intervals) for way in columns)] for n in own]
    return [["", "this run" + " [95 % interval]" * bool(intervals), *ways], *rows]


def _metric(name: str, metrics: Mapping[str, Any], intervals: Mapping[str, Sequence[float]]) -> str:
    value = _text(name, metrics[name]) if name in metrics else ""
    if name in intervals:
        low, high = intervals[name]
        value += f" [{low:.3g}, {high:.3g}]"
    return value


def _text(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name.endswith("_bytes") and isinstance(value, int | float):
        return format_bytes(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _first_rows(path: Path) -> Table:
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        rows = itertools.islice(csv.reader(file), 1 + PREVIEWED_ROWS)
        return [[cell[:PREVIEWED_CHARACTERS] for cell in row] for row in rows if row]


# -- pictures --------------------------------------------------------------------------------------
def result_pictures(fields: Mapping[str, Any]) -> Iterator[bytes]:
    """The loss curve of a training run, the pictures of `test`, the memory of `probe-batch`."""
    named = [*fields.get("pictures", []), fields.get("picture")]
    if "run" in fields:
        named.append(Path(str(fields["run"]), "loss.png"))
    for path in filter(None, named):
        if Path(path).is_file():
            yield Path(path).read_bytes()
    if fields.get("limit_bytes") and (chart := draw_memory(fields)):
        yield chart


def draw_memory(fields: Mapping[str, Any]) -> bytes | None:
    """A PNG of each trial's memory against the limit; None where none was measured."""
    used = {t["batch"]: t["used_bytes"] / GIB for t in fields["trials"] if t["used_bytes"]}
    if not used:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    batches, limit = sorted(used), fields["limit_bytes"] / GIB
    figure = Figure(figsize=(7, 1.5 + 0.3 * len(used)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.barh([str(batch) for batch in batches], [used[batch] for batch in batches])
    axes.axvline(limit, color="tab:red", label=f"limit {limit:.3g} GiB")
    axes.set(xlabel="memory a device, GiB", ylabel="batch a device")
    axes.legend(loc="lower right")
    picture = io.BytesIO()
    figure.savefig(picture, dpi=110, format="png")
    return picture.getvalue()
