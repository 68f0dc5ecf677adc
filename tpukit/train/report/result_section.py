"""The part of a page that shows what `tpukit test` found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tpukit.train.report.kept_tests import read_tests
from tpukit.train.report.markup import MOST_ROWS, escaped, joined, number_text
from tpukit.train.report.metric_table import MetricCell, metric_table
from tpukit.train.storage.run_folder import RunFolder

MOST_TESTS = 20
MOST_EXAMPLES = 10


def result_sections(folder: RunFolder) -> Iterator[str]:
    """One for each data set, the latest test first."""
    tests = sorted(read_tests(folder).values(), key=lambda t: str(t.get("time")), reverse=True)
    for test in tests[:MOST_TESTS]:
        data = str(test.get("data") or "")
        on = f" on {escaped(Path(data).name)}" if data else ""
        of = f" of {data}" if data else ""
        count = test.get("samples")
        samples = f"{count:,} samples{of}, " if isinstance(count, int) else ""
        time = str(test.get("time")).replace("T", " ")
        about = escaped(f"{samples}checkpoint of step {test.get('step')}, {time}")
        examples = joined(_examples(test, kind) for kind in ("best", "worst"))
        yield (
            f'<section><h2>Test{on}</h2><p class="note">{about}; brackets: 95 %'
            f" intervals; arrows: which way is better</p>{_metrics(test)}{examples}</section>"
        )


def _metrics(test: Mapping[str, Any]) -> str:
    table = metric_table(test)
    head = "".join(f'<th class="number">{escaped(way)}</th>' for way in table.ways)
    lines = [
        f"<tr><th>{escaped(name)}</th>{''.join(map(_metric_cell, cells))}</tr>"
        for name, cells in list(table.rows.items())[:MOST_ROWS]
    ]
    return (
        f'<div class="wide" tabindex="0"><table><thead><tr><th>metric</th>{head}</tr></thead>'
        f"<tbody>{joined(lines)}</tbody></table></div>"
    )


def _metric_cell(cell: MetricCell) -> str:
    if cell.value is None:
        return '<td class="number"></td>'
    value = number_text(cell.value)
    ends = ", ".join(map(number_text, cell.interval or ()))
    between = f' <span class="range">[{ends}]</span>' if ends else ""
    return f'<td class="number">{f"<b>{value}</b>" if cell.is_best else value}{between}</td>'


def _examples(test: Mapping[str, Any], kind: str) -> str:
    """The best or the worst samples of a test that names some, a row each."""
    found = test.get(kind)
    rows = [row for row in found if isinstance(row, Mapping)] if isinstance(found, list) else []
    if not rows:
        return ""
    names = list(dict.fromkeys(name for row in rows for name in row))
    head = "".join(f"<th>{escaped(name)}</th>" for name in names)
    lines = [
        f"<tr>{''.join(_example_cell(row.get(n, '')) for n in names)}</tr>"
        for row in rows[:MOST_EXAMPLES]
    ]
    return (
        f'<details><summary>The {kind} samples</summary><div class="wide" tabindex="0">'
        f'<table class="samples"><thead><tr>{head}</tr></thead><tbody>{joined(lines)}</tbody>'
        "</table></div></details>"
    )


def _example_cell(value: Any) -> str:
    if isinstance(value, float):
        return f'<td class="number">{number_text(value)}</td>'
    return f"<td>{escaped(value)}</td>"
