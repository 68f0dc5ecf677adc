"""report.html: one page with everything in it, made from the files of a run folder."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import tpukit
from tpukit.io.secrets import HIDDEN, without_secrets
from tpukit.io.units import format_bytes, format_duration
from tpukit.train.report.charts import charts_of
from tpukit.train.report.embedded_pictures import MOST_BYTES, EmbeddedPictures, pictures_of
from tpukit.train.report.history import History
from tpukit.train.report.kept_tests import Cell, metric_table, read_tests
from tpukit.train.report.series import MOST_POINTS, MetricSeries
from tpukit.train.storage.run_folder import RunFolder, read_config, read_last_best

LONGEST_TEXT = 2000
"""Characters of one value."""
MOST_ROWS = 200
"""Of one table."""
MOST_TESTS = 20
MOST_EXAMPLES = 10


def render_page(
    folder: RunFolder, metrics: MetricSeries, history: History, pictures: EmbeddedPictures
) -> str:
    """The whole page. Raises CheckpointError where config.toml is missing or damaged."""
    config = read_config(folder)
    data = {"charts": charts_of(metrics), "clock": history.clock.thinned(MOST_POINTS)}
    style, script = _resource("page.css"), _resource("page.js")
    curve = _picture(folder.path / "loss.png", "loss curve", pictures, MOST_BYTES // 10)
    return Template(_resource("page.html")).substitute(
        title=_text(folder.path.resolve().name),
        task=_text(config["task"].get("name")),
        status=_text(_status(metrics, history, config)),
        tiles=_joined(_tiles(folder, metrics, history, config)),
        command=f"<pre>{_text(history.command)}</pre>" if history.command else "",
        warnings=_warnings(history),
        tests=f'<div class="tests">{_joined(_tests(folder))}</div>',
        curves=Template(_resource("curves.html")).substitute(picture=curve)
        if data["charts"]
        else "<p>No metrics yet.</p>",
        pictures=_gallery(folder, pictures),
        facts=_table(_facts(folder, history, config), "facts"),
        details=_joined(_details(history, config)),
        # `</script>` in a name would end the block.
        data=json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
        style=style,
        script=script,
        style_sum=_sum_of_source(style),
        script_sum=_sum_of_source(script),
        version=_text(tpukit.__version__),
        time=f"{datetime.now():%Y-%m-%d %H:%M:%S}",
    )


def _resource(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _sum_of_source(text: str) -> str:
    """What the page's Content-Security-Policy allows: this style or script and no other."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


# -- text ------------------------------------------------------------------------------------------
def _text(value: Any) -> str:
    """A value as it may stand in the page: escaped, without secrets, not too long."""
    text = without_secrets(str(value))
    return html.escape(text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]} ...")


def _joined(parts: Iterable[str]) -> str:
    return "\n".join(parts)


def _number(value: float) -> str:
    """`1,200`, `0.4100`, `1.234e-05`."""
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:#.4g}"


def _table(rows: Mapping[str, Any], kind: str = "") -> str:
    """Names and values, those of secrets hidden."""
    lines = []
    for name, value in list(rows.items())[:MOST_ROWS]:
        hidden = HIDDEN in without_secrets(f"{name}={value}")
        lines.append(
            f"<tr><th>{_text(name)}</th><td>{_text(HIDDEN if hidden else value)}</td></tr>"
        )
    return f'<div class="wide"><table class="{kind}"><tbody>{_joined(lines)}</tbody></table></div>'


# -- the head of the page --------------------------------------------------------------------------
def _last_step(metrics: MetricSeries) -> int:
    both = [*metrics.train.values(), *metrics.valid.values()]
    return max((series.points[-1][0] for series in both), default=0)


def _status(metrics: MetricSeries, history: History, config: Mapping[str, Any]) -> str:
    total = config.get("decided", {}).get("total_steps")
    if history.ended:
        return history.ended
    return f"At step {_last_step(metrics):,}" + (f" of {total:,}." if total else ".")


def _tiles(
    folder: RunFolder, metrics: MetricSeries, history: History, config: Mapping[str, Any]
) -> Iterator[str]:
    total = config.get("decided", {}).get("total_steps")
    last = {name: series.points[-1][1] for name, series in metrics.train.items()}
    yield _tile("Steps", f"{_last_step(metrics):,}", f"of {total:,}" if total else "")
    if "loss" in last:
        first = metrics.train["loss"].points[0][1]
        yield _tile("Training loss", _number(last["loss"]), f"{_number(first)} at first")
    best = read_last_best(folder)
    for name in (name for name in best if name != "step"):
        step = f"at step {best.get('step', 0):,.0f}"
        yield _tile(f"Best validation {name.replace('_', ' ')}", _number(best[name]), step)
    if rate := last.get("samples_per_second"):
        yield _tile("Rate", f"{_number(rate)} samples/s")
    if peak := metrics.train.get("memory_peak"):
        yield _tile("Peak memory", format_bytes(max(point[3] for point in peak.points)))
    if compilations := last.get("compilations"):
        yield _tile("Compilations", f"{compilations:,.0f}")
    if history.sessions:
        count = f"in {history.sessions} sessions" if history.sessions > 1 else ""
        yield _tile("Training time", format_duration(history.seconds), count)


def _tile(name: str, value: str, note: str = "") -> str:
    small = f"<small>{_text(note)}</small>" if note else ""
    return f"<div><dt>{_text(name)}</dt><dd>{_text(value)}{small}</dd></div>"


def _warnings(history: History) -> str:
    if not history.warnings:
        return ""
    lines = [
        f"<li>{_text(w.text.removeprefix('Warning: '))}"
        f' <span class="note">{w.last:%Y-%m-%d %H:%M:%S}{f", {w.count} times" * (w.count > 1)}'
        "</span></li>"
        for w in history.warnings.values()
    ]
    return f'<section class="warnings"><h2>Warnings</h2><ul>{_joined(lines)}</ul></section>'


# -- tests -----------------------------------------------------------------------------------------
def _tests(folder: RunFolder) -> Iterator[str]:
    tests = sorted(read_tests(folder).values(), key=lambda t: str(t.get("time")), reverse=True)
    for test in tests[:MOST_TESTS]:
        data = str(test.get("data") or "")
        on = f" on {_text(Path(data).name)}" if data else ""
        samples = (
            f"{test['samples']:,} samples of {data}, "
            if isinstance(test.get("samples"), int)
            else ""
        )
        time = str(test.get("time")).replace("T", " ")
        about = _text(f"{samples}checkpoint of step {test.get('step')}, {time}")
        examples = _joined(_examples(test, kind) for kind in ("best", "worst"))
        yield (
            f'<section><h2>Test{on}</h2><p class="note">{about}; brackets: 95 %'
            f" intervals</p>{_metrics(test)}{examples}</section>"
        )


def _metrics(test: Mapping[str, Any]) -> str:
    ways, rows = metric_table(test)
    head = "".join(f'<th class="number">{_text(n)}</th>' for n in ("value", *ways))
    lines = [
        f"<tr><th>{_text(name)}</th>{''.join(map(_metric_cell, cells))}</tr>"
        for name, cells in list(rows.items())[:MOST_ROWS]
    ]
    return (
        f'<div class="wide" tabindex="0"><table><thead><tr><th>metric</th>{head}</tr></thead>'
        f"<tbody>{_joined(lines)}</tbody></table></div>"
    )


def _metric_cell(cell: Cell) -> str:
    value, interval = cell
    if value is None:
        return '<td class="number"></td>'
    ends = ", ".join(map(_number, interval or ()))
    between = f' <span class="range">[{ends}]</span>' if ends else ""
    return f'<td class="number">{_number(value)}{between}</td>'


def _examples(test: Mapping[str, Any], kind: str) -> str:
    """The best or the worst samples of a test that names some, a row each."""
    found = test.get(kind)
    rows = [row for row in found if isinstance(row, Mapping)] if isinstance(found, list) else []
    if not rows:
        return ""
    names = list(dict.fromkeys(name for row in rows for name in row))
    head = "".join(f"<th>{_text(name)}</th>" for name in names)
    lines = [
        f"<tr>{''.join(_example_cell(row.get(n, '')) for n in names)}</tr>"
        for row in rows[:MOST_EXAMPLES]
    ]
    return (
        f'<details><summary>The {kind} samples</summary><div class="wide" tabindex="0">'
        f'<table class="samples"><thead><tr>{head}</tr></thead><tbody>{_joined(lines)}</tbody>'
        "</table></div></details>"
    )


def _example_cell(value: Any) -> str:
    if isinstance(value, float):
        return f'<td class="number">{_number(value)}</td>'
    return f"<td>{_text(value)}</td>"


# -- pictures --------------------------------------------------------------------------------------
def _gallery(folder: RunFolder, pictures: EmbeddedPictures) -> str:
    paths = pictures_of(folder.path)
    share = MOST_BYTES // max(4, len(paths))
    shown = [_picture(path, path.relative_to(folder.path), pictures, share) for path in paths]
    if not any(shown):
        return ""
    return f'<section><h2>Pictures</h2><div class="gallery">{_joined(shown)}</div></section>'


def _picture(path: Path, name: object, pictures: EmbeddedPictures, most_bytes: int) -> str:
    uri = pictures.uri(path, most_bytes)
    if uri is None:
        return ""
    image = f'<div class="scroll" tabindex="0"><img src="{uri}" alt="{_text(name)}"></div>'
    return f"<figure>{image}<figcaption>{_text(name)}</figcaption></figure>"


# -- what was run ----------------------------------------------------------------------------------
def _facts(folder: RunFolder, history: History, config: Mapping[str, Any]) -> dict[str, Any]:
    task, decided = config["task"], config.get("decided", {})
    counts = [f"{decided[f'{part}_samples']:,} {part} samples"
              for part in ("training", "validation") if decided.get(f"{part}_samples")]  # fmt: skip
    path = config["train"].get("data_path")
    facts = {
        "task": task.get("source") or task.get("name"),
        "data": ", ".join([*([path] if path else []), *counts]),
        "model": history.about.get("Model"),
        "ran on": history.about.get("Running on"),
        "run folder": folder.path,
        "began": f"{history.began:%Y-%m-%d %H:%M:%S}" if history.began else "",
    }
    return {name: value for name, value in facts.items() if value}


def _details(history: History, config: Mapping[str, Any]) -> Iterator[str]:
    names = {"train": "Training", "task": "Task", "decided": "Decided", "versions": "Versions"}
    parts = _joined(
        f"<div><h3>{title}</h3>{_table(config[name])}</div>"
        for name, title in names.items()
        if config.get(name)
    )
    yield (
        "<details open><summary>Configuration and versions</summary>"
        f'<div class="tables">{parts}</div></details>'
    )
    log = _joined(map(_text, history.tail))
    yield f"<details><summary>Last lines of the log</summary><pre>{log}</pre></details>"
