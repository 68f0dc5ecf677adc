"""Runs beside each other: the settings that differ, what was reached, and how each ended."""

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from tpukit.errors import CheckpointError, UsageError
from tpukit.io.lock import is_held
from tpukit.io.units import format_duration
from tpukit.train.report.history import History
from tpukit.train.run_folder import RunFolder, read_config, read_last_best, unfinished_at
from tpukit.train.run_log import read_metrics

LEFT_OUT = {"results_dir", "resume", "resume_from", "source", "log_every", "num_workers"}
"""Settings of a run that tell nothing of what it learns."""
LONGEST = 32
"""Characters of a cell in a terminal."""
State = Literal["finished", "stopped", "failed", "running"]


@dataclass(frozen=True)
class ComparedRun:
    """A run among others."""

    run: str
    state: State
    cause: str | None
    """What ended a run that failed, or where one stopped."""
    metric: str | None
    """Name of the best metric, without `valid_`."""
    best: float | None
    best_step: int | None
    step: int
    total_steps: int | None
    seconds: float | None
    """Time of all its sessions, without what lay between them; None for a run of an older tpukit,
    which did not log it."""
    mfu: float | None
    settings: Mapping[str, Any]


def compared_runs(folders: Sequence[Path]) -> list[ComparedRun]:
    """The runs in these folders: each a run, or a folder of runs. Raises UsageError for one of
    neither."""
    found = []
    for folder in folders:
        runs = [folder] if (folder / "config.toml").is_file() else [
            path.parent for path in sorted(folder.glob("*/config.toml"))
        ]  # fmt: skip
        if not runs:
            raise UsageError(
                f"{folder} is not a run folder, and holds none.",
                "Name folders that training wrote.",
            )
        found += runs
    return [_read(path) for path in dict.fromkeys(found)]


def _read(path: Path) -> ComparedRun:
    folder = RunFolder(path)
    try:
        config = read_config(folder)
    except CheckpointError as error:
        return ComparedRun(str(path), "failed", error.message, None, None, None, 0, None, None,
                           None, {})  # fmt: skip
    rows = read_metrics(folder)
    best = read_last_best(folder)
    name = next((key for key in best if key != "step"), None)
    rates = [row["mfu"] for row in rows if row["kind"] == "train" and row.get("mfu")]
    state, cause = _state(folder, config)
    total = config.get("decided", {}).get("total_steps")
    settings = {**config["train"], **config["task"]}
    return ComparedRun(
        str(path), state, cause, name, best[name] if name else None,
        int(best["step"]) if name else None, max((row["step"] for row in rows), default=0), total,
        max((row["elapsed_seconds"] for row in rows if "elapsed_seconds" in row), default=None),
        sum(rates) / len(rates) if rates else None,
        {key: value for key, value in settings.items() if key not in LEFT_OUT},
    )  # fmt: skip


def _state(folder: RunFolder, config: Mapping[str, Any]) -> tuple[State, str | None]:
    if is_held(folder.lock):
        return "running", None
    where = unfinished_at(folder, config)
    if not (folder.checkpoints / "latest").exists():
        where = where or "before its first checkpoint"
    history = History(folder)
    history.read()
    if history.failure and where:
        return "failed", history.failure
    return ("stopped", where) if where else ("finished", None)


# -- shown ---------------------------------------------------------------------------------------
def differing(runs: Sequence[ComparedRun]) -> list[str]:
    """The settings of which these runs have more than one value."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    values = {name: {json.dumps(run.settings.get(name), default=str) for run in runs}
              for name in names}  # fmt: skip
    return [name for name in names if len(values[name]) > 1]


def table_of(runs: Sequence[ComparedRun]) -> list[list[str]]:
    """A header and a row for each run, as texts."""
    settings = differing(runs)
    header = ["run", *settings, "best", "at step", "steps", "time", "MFU", "state"]
    rows = [
        [
            run.run, *(str(run.settings.get(name, "")) for name in settings),
            "" if run.best is None else f"{run.metric} {run.best:.4g}",
            "" if run.best_step is None else str(run.best_step),
            f"{run.step}" + (f" of {run.total_steps}" if run.total_steps else ""),
            "" if run.seconds is None else format_duration(run.seconds),
            "" if run.mfu is None else f"{run.mfu:.1%}",
            run.state + (f": {run.cause}" if run.cause else ""),
        ]
        for run in runs
    ]  # fmt: skip
    return [header, *rows]


def table_lines(table: Sequence[Sequence[str]]) -> list[str]:
    """The table for a terminal; long cells are cut at their front, the last one is whole."""
    cut = [
        [c if len(c) <= LONGEST else f"...{c[3 - LONGEST :]}" for c in row[:-1]] for row in table
    ]
    widths = [max(map(len, column)) for column in zip(*cut, strict=True)]
    return [
        "  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=True)), whole[-1]]).rstrip()
        for row, whole in zip(cut, table, strict=True)
    ]


def table_page(table: Sequence[Sequence[str]]) -> str:
    """The table as an HTML page, without script or network; runs link to their reports."""
    header, *rows = table
    head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    body = []
    for run, *cells in rows:
        place = html.escape(Path(run).resolve().as_uri())
        link = f'<a href="{place}/report.html">{html.escape(run)}</a>'
        body.append(f"<tr><td>{link}</td>" + "".join(f"<td>{html.escape(c)}</td>" for c in cells))
    style = "td,th{padding:.2em .8em;text-align:left;border-bottom:1px solid #ccc}"
    return (
        f"<!doctype html><meta charset=utf-8><title>Runs</title><style>{style}</style>"
        f"<table><tr>{head}</tr>{''.join(body)}</table>"
    )


def compared_fields(runs: Sequence[ComparedRun]) -> list[dict[str, Any]]:
    """The JSON fields: of the settings those that differ."""
    names = differing(runs)
    return [
        {**asdict(run), "settings": {name: run.settings.get(name) for name in names}}
        for run in runs
    ]
