"""report.html: one page with everything in it, made from the files of a run folder."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import tpukit
from tpukit.io.units import format_bytes, format_duration
from tpukit.train.report.charts import charts_of
from tpukit.train.report.embedded_pictures import MOST_BYTES, EmbeddedPictures, pictures_of
from tpukit.train.report.history import History
from tpukit.train.report.markup import escaped, joined, number_text, value_table
from tpukit.train.report.result_section import result_sections
from tpukit.train.report.series import MOST_POINTS, MetricSeries
from tpukit.train.storage.run_folder import RunFolder, read_config, read_last_best


def render_page(
    folder: RunFolder, metrics: MetricSeries, history: History, pictures: EmbeddedPictures
) -> str:
    """The whole page. Raises CheckpointError where config.toml is missing or damaged."""
    config = read_config(folder)
    data = {"charts": charts_of(metrics), "clock": history.clock.thinned(MOST_POINTS)}
    style, script = _resource("page.css"), _resource("page.js")
    curve = _picture(folder.path / "loss.png", "loss curve", pictures, MOST_BYTES // 10)
    return Template(_resource("page.html")).substitute(
        title=escaped(folder.path.resolve().name),
        task=escaped(config["task"].get("name")),
        status=escaped(_status(metrics, history, config)),
        tiles=joined(_tiles(folder, metrics, history, config)),
        command=f"<pre>{escaped(history.command)}</pre>" if history.command else "",
        warnings=_warnings(history),
        tests=f'<div class="tests">{joined(result_sections(folder))}</div>',
        curves=Template(_resource("curves.html")).substitute(
            picture=curve,
            validation="" if metrics.valid else '<p class="note">No validation yet.</p>',
        )
        if data["charts"]
        else "<p>No metrics yet.</p>",
        pictures=_gallery(folder, pictures),
        facts=value_table(_facts(folder, history, config), "facts"),
        details=joined(_details(history, config)),
        # `</script>` in a name would end the block.
        data=json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
        style=style,
        script=script,
        style_sum=_sum_of_source(style),
        script_sum=_sum_of_source(script),
        version=escaped(tpukit.__version__),
        time=f"{datetime.now():%Y-%m-%d %H:%M:%S}",
    )


def _resource(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _sum_of_source(text: str) -> str:
    """What the page's Content-Security-Policy allows: this style or script and no other."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


# -- the head of the page --------------------------------------------------------------------------
def _last_step(metrics: MetricSeries, history: History) -> int:
    """The last step that the log or the metrics name."""
    both = [*metrics.train.values(), *metrics.valid.values()]
    return max([history.step, *(series.points[-1][0] for series in both)])


def _status(metrics: MetricSeries, history: History, config: Mapping[str, Any]) -> str:
    total = config.get("decided", {}).get("total_steps")
    if history.ended:
        return history.ended
    return f"At step {_last_step(metrics, history):,}" + (f" of {total:,}." if total else ".")


def _tiles(
    folder: RunFolder, metrics: MetricSeries, history: History, config: Mapping[str, Any]
) -> Iterator[str]:
    total = config.get("decided", {}).get("total_steps")
    yield _tile("Steps", f"{_last_step(metrics, history):,}", f"of {total:,}" if total else "")
    if loss := metrics.train.get("loss"):
        (_, first, *_), (step, last, *_) = loss.points[0], loss.points[-1]
        note = f"at step {step:,}; {number_text(first)} at first"
        yield _tile("Training loss", number_text(last), note)
    best = read_last_best(folder)
    for name in (name for name in best if name != "step"):
        note = f"at step {best.get('step', 0):,.0f}"
        yield _tile(f"Best validation {name.replace('_', ' ')}", number_text(best[name]), note)
    if rate := metrics.mean_rate:
        yield _tile("Rate", number_text(rate), "samples/s, mean")
    if peak := metrics.train.get("memory_peak"):
        yield _tile("Peak memory", format_bytes(max(point[3] for point in peak.points)))
    compilations = metrics.train.get("compilations")
    if compilations and (count := compilations.points[-1][1]):
        yield _tile("Compilations", f"{count:,.0f}")
    if history.sessions:
        sessions = f"in {history.sessions} sessions" if history.sessions > 1 else ""
        yield _tile("Training time", format_duration(history.seconds), sessions)


def _tile(name: str, value: str, note: str = "") -> str:
    small = f"<small>{escaped(note)}</small>" if note else ""
    return f"<div><dt>{escaped(name)}</dt><dd>{escaped(value)}{small}</dd></div>"


def _warnings(history: History) -> str:
    if not history.warnings:
        return ""
    lines = [
        f"<li>{escaped(w.text.removeprefix('Warning: '))}"
        f' <span class="note">{w.last:%Y-%m-%d %H:%M:%S}{f", {w.count} times" * (w.count > 1)}'
        "</span></li>"
        for w in history.warnings.values()
    ]
    return f'<section class="warnings"><h2>Warnings</h2><ul>{joined(lines)}</ul></section>'


# -- pictures --------------------------------------------------------------------------------------
def _gallery(folder: RunFolder, pictures: EmbeddedPictures) -> str:
    paths = pictures_of(folder.path)
    share = MOST_BYTES // max(4, len(paths))
    shown = [_picture(path, path.relative_to(folder.path), pictures, share) for path in paths]
    if not any(shown):
        return ""
    return f'<section><h2>Pictures</h2><div class="gallery">{joined(shown)}</div></section>'


def _picture(path: Path, name: object, pictures: EmbeddedPictures, most_bytes: int) -> str:
    uri = pictures.uri(path, most_bytes)
    if uri is None:
        return ""
    image = f'<div class="scroll" tabindex="0"><img src="{uri}" alt="{escaped(name)}"></div>'
    return f"<figure>{image}<figcaption>{escaped(name)}</figcaption></figure>"


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
        **{name: text for name, text in history.about.items() if "Predicted" in name},
        "run folder": folder.path,
        "began": f"{history.began:%Y-%m-%d %H:%M:%S}" if history.began else "",
    }
    return {name: value for name, value in facts.items() if value}


def _details(history: History, config: Mapping[str, Any]) -> Iterator[str]:
    names = {"train": "Training", "task": "Task", "decided": "Decided", "versions": "Versions"}
    parts = joined(
        f"<div><h3>{title}</h3>{value_table(config[name])}</div>"
        for name, title in names.items()
        if config.get(name)
    )
    yield (
        "<details open><summary>Configuration and versions</summary>"
        f'<div class="tables">{parts}</div></details>'
    )
    log = joined(map(escaped, history.tail))
    yield f"<details><summary>Last lines of the log</summary><pre>{log}</pre></details>"
