"""report.html of a run folder: one page with everything in it, renewed while the run goes on."""

import base64
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import tpukit
from tpukit.io.files import write_file
from tpukit.io.secrets import HIDDEN, without_secrets
from tpukit.io.units import format_bytes, format_duration
from tpukit.train.report.curves import MOST_POINTS, MetricSeries, Series, charts_of
from tpukit.train.report.history import History
from tpukit.train.report.pictures import MOST_BYTES, data_uri, pictures_of
from tpukit.train.report.tested import metric_table, number_text
from tpukit.train.run_folder import RunFolder, TrainedRun, read_config, read_last_best

LONGEST_TEXT = 2000
"""Characters of one value."""
MOST_ROWS = 200
"""Maximum rows of one table."""
MOST_TESTS = 20
MOST_EXAMPLES = 10


class RunReport:
    """Writes report.html; each renewal reads only what the logs gained since the last one."""

    def __init__(self, folder: RunFolder, warn: Callable[[str], None]) -> None:
        self.folder = folder
        self._warn = warn
        self._metrics = MetricSeries(folder.metrics)
        self._history = History(folder)
        self._failed = False

    def renew(self) -> bool:
        """Writes the page anew; whether it could. A page must not end a run: an error is one
        warning."""
        try:
            self._metrics.read()
            self._history.read()
            page = render_page(self.folder, self._metrics, self._history)
            write_file(self.folder.report, page.encode(errors="replace"))
        except Exception as error:
            if not self._failed:
                self._warn(f"Warning: {self.folder.report} could not be written: {error}")
            self._failed = True
            return False
        return True


def report_test(run: TrainedRun, fields: Mapping[str, Any], log: Callable[[str], None]) -> None:
    """Keeps the JSON fields of a test in the run's folder and renews its page."""
    folder = run.folder
    try:
        keep_test(folder, fields, run.checkpoint.state.step)
    except Exception as error:  # a read-only run, or values that JSON cannot hold
        log(f"{folder.report} does not show this test: {error}.")
        return
    if RunReport(folder, log).renew():
        log(f"Report: {folder.report}")
    folder.store.publish_files()


# -- tests.json ----------------------------------------------------------------------------------
KEPT = ("task", "data", "samples", "skipped", "metrics", "metric_names", "methods",
        "intervals", "best", "worst")  # fmt: skip
"""The fields of `test --json` that are kept."""


def keep_test(folder: RunFolder, fields: Mapping[str, Any], step: int) -> None:
    """Keeps the result of a test on a data set, in place of the one before."""
    time = datetime.now().isoformat(timespec="seconds")
    kept = {name: fields[name] for name in KEPT if name in fields}
    tests = {
        **read_tests(folder),
        str(fields.get("data", "")): {**kept, "step": step, "time": time},
    }
    write_file(folder.tests, json.dumps(tests, indent=1, default=str).encode())


def read_tests(folder: RunFolder) -> dict[str, dict[str, Any]]:
    """The results by data set; none where the file is missing or damaged."""
    try:
        tests = json.loads(folder.tests.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    known = tests.items() if isinstance(tests, dict) else ()
    return {name: test for name, test in known if isinstance(test, dict)}


# -- the page --------------------------------------------------------------------------------------
def render_page(folder: RunFolder, metrics: MetricSeries, history: History) -> str:
    """The whole page. Raises CheckpointError where config.toml is missing or damaged."""
    config = read_config(folder)
    paths = pictures_of(folder.path)
    share = MOST_BYTES // max(4, len(paths))
    pictures = [(path.relative_to(folder.path), data_uri(path, share)) for path in paths]
    tests = sorted(read_tests(folder).values(), key=lambda t: str(t.get("time")), reverse=True)
    page: str = _template().render(
        title=folder.path.resolve().name,
        config=config,
        history=history,
        status=_status(metrics, history, config),
        tiles=_tiles(folder, metrics, history, config),
        tests=tests[:MOST_TESTS],
        data={"charts": charts_of(metrics), "clock": _clock(metrics).thinned(MOST_POINTS)},
        curve=data_uri(folder.path / "loss.png", MOST_BYTES // 10),
        has_validation=bool(metrics.valid),
        pictures=[(name, uri) for name, uri in pictures if uri],
        facts=_facts(folder, history, config),
        style=_resource("page.css"),
        script=_resource("page.js"),
        version=tpukit.__version__,
        time=f"{datetime.now():%Y-%m-%d %H:%M:%S}",
        MOST_ROWS=MOST_ROWS,
    )
    return page


@cache
def _template() -> Any:
    """page.html, whose values are escaped, without secrets, and not too long."""
    from jinja2 import Environment

    environment = Environment(autoescape=True, finalize=_shown)
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    environment.filters |= {
        "checksum": _checksum, "filename": lambda path: Path(path).name, "number": number_text,
        "metric_table": metric_table, "samples": _samples, "without_secret": _without_secret,
    }  # fmt: skip
    return environment.from_string(_resource("page.html"))


def _shown(value: Any) -> Any:
    if hasattr(value, "__html__"):
        return value
    text = without_secrets(str(value))
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]} ..."


def _without_secret(value: Any, name: str) -> Any:
    """The value of a name, hidden where both together look like a secret."""
    return HIDDEN if HIDDEN in without_secrets(f"{name}={value}") else value


def _resource(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _checksum(text: str) -> str:
    """What the page's Content-Security-Policy allows: this style or script and no other."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _samples(found: Any) -> list[dict[str, Any]]:
    """The best or the worst samples of a test that names some, each with every column."""
    rows = [row for row in found if isinstance(row, Mapping)] if isinstance(found, list) else []
    names = dict.fromkeys((name for row in rows for name in row), "")
    return [{**names, **row} for row in rows[:MOST_EXAMPLES]]


# -- the head of the page --------------------------------------------------------------------------
def _last_step(metrics: MetricSeries, history: History) -> int:
    """The last step that the log or the metrics name."""
    both = [*metrics.train.values(), *metrics.valid.values()]
    return max([history.step, *(series.points[-1][0] for series in both)])


def _clock(metrics: MetricSeries) -> Series:
    """Seconds of all sessions until each step."""
    return metrics.train.get("elapsed_seconds", Series())


def _status(metrics: MetricSeries, history: History, config: Mapping[str, Any]) -> str:
    total = config.get("decided", {}).get("total_steps")
    if history.ended:
        return history.ended
    return f"At step {_last_step(metrics, history):,}" + (f" of {total:,}." if total else ".")


def _tiles(
    folder: RunFolder, metrics: MetricSeries, history: History, config: Mapping[str, Any]
) -> Iterator[tuple[str, str, str]]:
    """Name, value and note of each."""
    total = config.get("decided", {}).get("total_steps")
    yield "Steps", f"{_last_step(metrics, history):,}", f"of {total:,}" if total else ""
    if loss := metrics.train.get("loss"):
        (_, first, *_), (step, last, *_) = loss.points[0], loss.points[-1]
        note = f"at step {step:,}; {number_text(first)} at first"
        yield "Training loss", number_text(last), note
    best = read_last_best(folder)
    for name in (name for name in best if name != "step"):
        note = f"at step {best.get('step', 0):,.0f}"
        yield f"Best validation {name.replace('_', ' ')}", number_text(best[name]), note
    if rate := metrics.mean_rate:
        yield "Rate", number_text(rate), "samples/s, mean"
    if goodput := metrics.train.get("goodput"):
        share = goodput.points[-1][1]
        yield "Goodput", f"{share:.1%}", "of all sessions' time made steps that are kept"
    if peak := metrics.train.get("memory_peak"):
        yield "Peak memory", format_bytes(max(point[3] for point in peak.points)), ""
    compilations = metrics.train.get("compilations")
    if compilations and (count := compilations.points[-1][1]):
        yield "Compilations", f"{count:,.0f}", ""
    if points := _clock(metrics).points:
        sessions = f"in {history.sessions} sessions" if history.sessions > 1 else ""
        yield "Training time", format_duration(points[-1][1]), sessions


def _facts(folder: RunFolder, history: History, config: Mapping[str, Any]) -> dict[str, Any]:
    task, decided = config["task"], config.get("decided", {})
    counts = [f"{decided[f'{part}_samples']:,} {part} samples"
              for part in ("training", "validation") if decided.get(f"{part}_samples")]  # fmt: skip
    path = config["train"].get("data_path")
    facts = {
        "task": task.get("source") or task.get("name"),
        "data": ", ".join([*([path] if path else []), *counts]),
        "model": history.session.get("model"),
        "ran on": history.session.get("device"),
        "run folder": folder.shown,
        "began": f"{history.began:%Y-%m-%d %H:%M:%S}" if history.began else "",
    }
    return {name: value for name, value in facts.items() if value}
