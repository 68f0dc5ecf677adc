"""Results in a notebook's cell: tables and pictures."""

import contextlib
import html
import io
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tpukit.errors import DataError
from tpukit.io.tables import open_table
from tpukit.io.units import GIB, format_bytes
from tpukit.train.report.tested import MetricCell, cell_text, metric_table

Table = list[list[str]]

HIDDEN = {
    *("command", "compiles", "data", "devices", "exact", "largest_global_batch", "limit_bytes"),
    *("parameters", "path", "per_sample", "picture", "predictions", "seconds", "target", "task"),
    *("finished", "stopped_early"),
}
"""Fields that the command prints, or whose files are shown."""
PREVIEWED_ROWS = 3
PREVIEWED_CHARACTERS = 80


class Bold(str):
    """A cell that is the best of its row."""

    __slots__ = ()


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
    cells = [[_html(cell) for cell in row] for row in table]
    rows = "".join(
        f"<tr><th style='text-align:left'>{name}</th>"
        + "".join(f"<td style='text-align:left'>{value}</td>" for value in values)
        + "</tr>"
        for name, *values in cells
    )
    text = "\n".join("  ".join(row) for row in table)
    display.display({"text/html": f"<table>{rows}</table>", "text/plain": text}, raw=True)


def _html(cell: str) -> str:
    return f"<b>{html.escape(cell)}</b>" if isinstance(cell, Bold) else html.escape(cell)


def show_picture(display: Any, png: bytes) -> None:
    """A PNG picture below the cell."""
    display.display(display.Image(data=png, format="png"))


# -- tables --------------------------------------------------------------------------------------
def result_tables(fields: Mapping[str, Any]) -> Iterator[Table]:
    """Plain fields; metrics, beside those of other methods; trials; a CSV file's first rows."""
    best = fields.get("best")
    named = {f"best {n}": v for n, v in best.items()} if isinstance(best, Mapping) else {}
    if "finished" in fields:
        named["ended"] = _end(fields)
    shown = {n: v for n, v in {**fields, **named}.items() if n not in HIDDEN}
    plain = {n: v for n, v in shown.items() if isinstance(v, str | int | float)}
    if len(plain) > 1:
        yield [[name.replace("_", " "), _text(name, value)] for name, value in plain.items()]
    if fields.get("metrics"):
        yield metrics_table(fields)
    if trials := fields.get("trials"):
        yield trials_table(trials)
    path = Path(str(fields.get("path", "")))
    if path.suffix == ".csv" and path.is_file():
        with contextlib.suppress(DataError):
            yield _first_rows(path)


def _end(fields: Mapping[str, Any]) -> str:
    """The end of a training; an interrupted one has no result."""
    if fields.get("stopped_early"):
        return "early: validation no longer improved"
    return "with its last step" if fields["finished"] else "at its time limit; the cell goes on"


def metrics_table(fields: Mapping[str, Any]) -> Table:
    """A row a metric, a column a way to compute the result; the best of each row bold."""
    table = metric_table(fields)
    rows = [[name, *map(_metric, cells)] for name, cells in table.rows.items()]
    return [["", *table.ways], *rows]


def _metric(cell: MetricCell) -> str:
    text = cell_text(cell)
    return Bold(text) if cell.is_best else text


def trials_table(trials: Sequence[Mapping[str, Any]]) -> Table:
    """A row a trial of `probe-batch`."""
    rows = [
        [f"{trial['batch']:,}", format_bytes(trial["used_bytes"]) if trial["used_bytes"] else "",
         str(trial["verdict"]), f"{speed:.3g}" if (speed := trial["samples_per_second"]) else "",
         f"{trial['seconds']:.0f}"]
        for trial in trials
    ]  # fmt: skip
    return [["batch a device", "memory", "verdict", "samples/s", "took, s"], *rows]


def _text(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name.endswith("_bytes") and isinstance(value, int | float):
        return format_bytes(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _first_rows(path: Path) -> Table:
    table = open_table(path)
    rows = [record.fields for record in itertools.islice(table.records, PREVIEWED_ROWS)]
    return [[cell[:PREVIEWED_CHARACTERS] for cell in row] for row in (table.columns, *rows)]


# -- pictures ------------------------------------------------------------------------------------
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
    from matplotlib.figure import Figure

    batches, limit = sorted(used), fields["limit_bytes"] / GIB
    figure = Figure(figsize=(7, 1.5 + 0.3 * len(used)), layout="constrained")
    axes = figure.add_subplot()
    axes.barh([str(batch) for batch in batches], [used[batch] for batch in batches])
    axes.axvline(limit, color="tab:red", label=f"limit {limit:.3g} GiB")
    axes.set(xlabel="memory a device, GiB", ylabel="batch a device")
    axes.legend(loc="lower right")
    picture = io.BytesIO()
    figure.savefig(picture, dpi=110, format="png")
    return picture.getvalue()
