"""`tpukit train --folds`: the folds of a task, each a run of its own in a process of its own."""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer

from tpukit.commands.options.training import GivenSettings
from tpukit.commands.output import Output
from tpukit.errors import ConfigError, DataError
from tpukit.hardware.select import prepare_environment, rank_count
from tpukit.io.files import write_file
from tpukit.io.interrupts import handling
from tpukit.io.lock import LockedError, exclusive
from tpukit.io.process import PARENT_VARIABLE
from tpukit.registry.declared import find_source, setting_fields
from tpukit.registry.recognise import run_folder_of

FOLD = "fold-"
"""How the names of the folders of folds begin."""
OWN = ("--folds", "--results-dir", "--max-time")
"""Options that each fold has a value of its own for."""


@dataclass
class Folds:
    """The folds of a folder."""

    folder: Path
    settings: Mapping[str, list[str]]
    """Name -> the settings that make a run that fold's."""
    words: Sequence[str]
    """The command line that they share."""
    received: list[int] = field(default_factory=list)
    """Signals that were passed on."""

    def path(self, name: str) -> Path:
        plain = re.sub(r"[^\w.-]", "_", name)
        return self.folder / f"{FOLD}{plain}"

    def finished(self) -> dict[str, Path]:
        """Those with out-of-fold predictions, by name."""
        from tpukit.train.held_out import FILE

        paths = {name: self.path(name) for name in self.settings}
        return {name: path for name, path in paths.items() if (path / FILE).is_file()}

    def start(self, name: str, seconds: float | None, gpu: int | None) -> subprocess.Popen[bytes]:
        """A process that trains a fold, or goes on with it."""
        own = [word for pair in self.settings[name] for word in ("--set", pair)]
        time_left = [] if seconds is None else ["--max-time", f"{seconds:.0f}s"]
        words = [*self.words, "--results-dir", str(self.path(name)), *own, *time_left]
        place = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": str(gpu)}
        return subprocess.Popen(
            [sys.executable, "-m", "tpukit", *words], start_new_session=True,
            env={**os.environ, PARENT_VARIABLE: str(os.getpid()), **place},
        )  # fmt: skip


def train_folds(task: str, folds: str, settings: GivenSettings, output: Output) -> None:
    """Trains all folds that are not finished, and compares those that are."""
    started = time.monotonic()
    given = {**settings.file.task, **settings.task}
    _require_folds(task)
    hardware = settings.hardware()
    kind = prepare_environment(hardware)
    folder = Path(settings.get("results_dir") or run_folder_of(task) or "results/folds")
    made = Folds(folder, _settings(folds, settings, given), _shared_words(task))
    _require_own_folders(made)
    gpus = rank_count(hardware, kind) if kind == "gpu" and hardware.devices is None else 1
    seconds = settings.get("max_time")
    ends = None if seconds is None else started + float(seconds)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with exclusive(folder / ".lock"), _passing_signals_on(made) as running:
            code, left_out = _train(made, running, ends, gpus, output)
    except LockedError as error:
        raise ConfigError(
            f"Another command is training the folds in {folder} (process {error.owner}).",
            "Wait for it, or choose another folder with --results-dir.",
            id="run-locked",
        ) from error
    fields = _compare(made, settings, output)
    # A fold that is to go on may have finished a shorter run.
    done = made.finished().keys() - {*left_out}
    if missing := [name for name in made.settings if name not in done]:
        # With an input that is wrong the same command ends the same.
        way = "" if code == ConfigError.exit_code else f" Go on with: {settings.command}"
        output.text(f"Not finished: fold {', '.join(missing)}.{way}")
    output.result({"run": str(folder), "finished": not missing, **fields})
    if code:
        raise typer.Exit(128 + made.received[0] if made.received else code)


def _train(
    folds: Folds, running: dict[str, subprocess.Popen[bytes]], ends: float | None, gpus: int,
    output: Output,
) -> tuple[int, list[str]]:  # fmt: skip
    """Trains one fold after the other, or one a GPU; the exit code of the first that fails, and the
    folds that no time was left for."""
    waiting, free, places = list(folds.settings), list(range(gpus)), dict[str, int]()
    code, left_out = 0, list[str]()
    while running or (waiting and not code and not folds.received):
        while waiting and free and not code and not folds.received:
            left = None if ends is None else ends - time.monotonic()
            if left is not None and left < 1:
                waiting, left_out = [], waiting
                break
            name = waiting.pop(0)
            places[name] = free.pop(0)
            output.text(f"Fold {name}: {folds.path(name)}")
            running[name] = folds.start(name, left, places[name] if gpus > 1 else None)
        for name, process in [*running.items()]:
            try:
                ended = process.wait(0.2)
            except subprocess.TimeoutExpired:
                continue
            del running[name]
            free.append(places[name])
            code = code or ended
    return code, left_out


@contextmanager
def _passing_signals_on(folds: Folds) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Passes signals to the processes that are running: they save and end."""
    running: dict[str, subprocess.Popen[bytes]] = {}

    def pass_on(number: int, frame: object) -> None:
        folds.received.append(number)
        for process in running.values():
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)

    with handling(pass_on):
        yield running


def _require_folds(task: str) -> None:
    """Raises ConfigError for a task that takes no fold."""
    source = find_source(task)
    names = {field.name for field in setting_fields(source)} if source else {"fold", "folds"}
    if not {"fold", "folds"} <= names:
        raise ConfigError(
            f"--folds: task {task} has no settings `fold` and `folds`.",
            "Give its constructor both, and choose the validation rows by"
            " `tpukit.split_rows(labels, groups, fold=fold, folds=folds)`.",
        )


def _require_own_folders(folds: Folds) -> None:
    """Raises ConfigError for two folds of one folder, and for folders of other folds, whose rows
    and predictions would be taken for these."""
    from tpukit.train.run_folder import RunFolder, read_config

    paths: dict[Path, str] = {}
    for name in folds.settings:
        if (other := paths.setdefault(folds.path(name), name)) != name:
            raise ConfigError(
                f"--folds: {other!r} and {name!r} have one folder, {folds.path(name)}.",
                "Rename one of them in the table.",
            )
    for path in sorted(folds.folder.glob(f"{FOLD}*")):
        if not (path / "config.toml").is_file():
            continue
        kept = read_config(RunFolder(path))["task"]
        own = {
            f"{n}={kept[n]}" for n in ("fold", "folds", "fold_column") if kept.get(n) is not None
        }
        if path not in paths or own != {*folds.settings[paths[path]]}:
            raise ConfigError(
                f"{path} is of other folds ({', '.join(sorted(own)) or 'none'}).",
                "Choose another folder with --results-dir, or remove it.",
            )


def _settings(
    folds: str, settings: GivenSettings, given: Mapping[str, Any]
) -> Mapping[str, list[str]]:
    """A number of folds, or the values of a column of the table."""
    if folds.isdigit() and int(folds) > 1:
        return {str(n): [f"fold={n}", f"folds={folds}"] for n in range(int(folds))}
    from tpukit.train.labelled import TableSettings, named_parts, training_table
    from tpukit.train.target import numbers_first

    data_path = settings.get("data_path") or "./data"
    table = training_table(TableSettings(data_path=data_path, table=given.get("table")))
    if table is None:
        raise ConfigError(f"--folds {folds}: there is no table.", "Give a number from 2 on.")
    names = named_parts(table, "--folds", folds)
    if count := names.count(None):
        raise DataError(
            f"{table.path}: {count} of {len(names)} rows have no value in the column {folds!r}.",
            "Give each row its fold, or leave these rows out.",
        )
    parts = numbers_first({name for name in names if name is not None})
    return {name: [f"fold={name}", f"fold_column={folds}"] for name in parts}


def _shared_words(task: str) -> list[str]:
    """The words of the command line without those that each fold has of its own."""
    words, skips = [], False
    for word in sys.argv[1:]:
        flag = word.partition("=")[0]
        if skips or flag in OWN or word == "--json":
            skips = not skips and flag in OWN and "=" not in word
            continue
        words.append(word)
    named = any(word.partition("=")[0] == "--task" for word in words)
    return words if named else [*words, "--task", task]


# -- the report ----------------------------------------------------------------------------------
def _compare(folds: Folds, settings: GivenSettings, output: Output) -> dict[str, Any]:
    """Scores of the folds that are finished: out_of_fold.csv, folds.json, report.html."""
    from tpukit.train.held_out import ALL_FILE, summarise
    from tpukit.train.metric_names import MetricName, parse_metrics
    from tpukit.train.target import DEFAULT_METRICS, Target

    finished = folds.finished()
    if not finished:
        return {"folds": {}, "metrics": {}}
    asked = settings.get("metric")

    def metrics(target: Target) -> Sequence[MetricName]:
        return parse_metrics(asked or DEFAULT_METRICS[target.kind])

    found = summarise(folds.folder, finished, metrics)
    lines = [f"{'fold':>12}  " + "  ".join(f"{name:>10}" for name in found["metrics"])]
    rows = {name: list(row.values()) for name, row in found["folds"].items()}
    rows |= {key: [m[key] for m in found["metrics"].values()]
             for key in ("mean", "deviation", "together")}  # fmt: skip
    for name, values in rows.items():
        shown = ("-" if value is None else f"{value:.4g}" for value in values)
        lines.append(f"{name:>12}  " + "  ".join(f"{text:>10}" for text in shown))
    for name, metric in found["metrics"].items():
        if ends := metric["interval"]:
            lines.append(f"{name} of all {found['rows']} samples together: {metric['together']:.4g}"
                         f" [{ends[0]:.4g}, {ends[1]:.4g}]")  # fmt: skip
    if "cuts" in found:
        first, cuts = next(iter(found["metrics"])), ", ".join(f"{c:.3g}" for c in found["cuts"])
        lines.append(f"{first} with cut points fitted to these ({cuts}): {found['with_cuts']:.4g}")
    for line in lines:
        output.text(line)
    page = _page(folds, finished, lines)
    write_file(folds.folder / "report.html", page.encode())
    output.text(f"Out-of-fold predictions: {folds.folder / ALL_FILE}")
    return found


def _page(folds: Folds, finished: Mapping[str, Path], lines: Sequence[str]) -> str:
    """One page about all folds, with links to each one's."""
    links = "".join(
        f'<li><a href="{html.escape(path.name)}/report.html">fold {html.escape(name)}</a></li>'
        for name, path in finished.items()
    )
    return (
        f"<!doctype html><meta charset=utf-8><title>{html.escape(folds.folder.name)}</title>"
        f"<h1>{len(finished)} of {len(folds.settings)} folds</h1>"
        f"<pre>{html.escape(chr(10).join(lines))}</pre><ul>{links}</ul>"
    )
