"""Report of a run: where it stands, its losses and its pictures; as text, or in a notebook."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpukit.commands.reports.inline import notebook_display, show_picture, show_table
from tpukit.errors import ConfigError
from tpukit.train.report.pictures import pictures_of
from tpukit.train.run_folder import RunFolder, read_config, read_last_best, run_folder
from tpukit.train.run_log import loss_curve, read_metrics

if TYPE_CHECKING:
    from tpukit.registry.trained import TrainedTask
    from tpukit.train.requests import TrainingResult


def show(
    run: str | Path | TrainingResult | TrainedTask, *, log: Callable[[str], None] = print
) -> None:
    """Shows a run, finished or not: its summary; in a notebook its loss curve and pictures too.

    run: a run folder, or what `fit` or `load` returned. `log` is called with each line; a notebook
    shows a table in their place.
    """
    folder = run_folder(_path(run))
    folder.store.pull(best=True)
    display = notebook_display()
    if display is None:
        for line in summarize_run(folder):
            log(line)
        return
    show_table(display, [["run", folder.shown], *map(list, summary_rows(folder))])
    for picture in [loss_curve(folder), *(p.read_bytes() for p in pictures_of(folder.path))]:
        if picture is not None:
            show_picture(display, picture)


def _path(run: str | Path | TrainingResult | TrainedTask) -> Path:
    """The folder of a run, of what `fit` returned, or of what `load` returned."""
    if isinstance(run, str | Path):
        return Path(run)
    if run.run is None:
        raise ConfigError("A checkpoint file has no run to show.", "Give the folder of one.")
    return Path(run.run if isinstance(run.run, str) else run.run.folder.shown)


def summarize_run(folder: RunFolder) -> Iterator[str]:
    """The lines for people. Raises CheckpointError where there is no run."""
    rows = summary_rows(folder)
    yield f"{folder.shown}: task {next(rows)[1]}"
    for name, text in rows:
        yield f"  {name:<12}{text}"


def summary_rows(folder: RunFolder) -> Iterator[tuple[str, str]]:
    """What is known of a run, by name. Raises CheckpointError where there is no run."""
    config, rows = read_config(folder), read_metrics(folder)
    task, decided = config.get("task", {}), config.get("decided", {})
    train = [row for row in rows if row["kind"] == "train"]
    valid = [row for row in rows if row["kind"] == "valid"]
    yield "task", str(task.get("name"))
    device = (
        f"{decided.get('device')}, {decided.get('devices')} device(s), {decided.get('precision')}"
    )
    yield "ran on", f"{device}; torch {config.get('versions', {}).get('torch')}"
    counts = decided.get("training_samples"), decided.get("validation_samples")
    yield "data", f"{counts[0]} training, {counts[1]} validation samples"
    if not train:
        yield "metrics", "none yet"
        return
    last = train[-1]
    yield "steps", f"{last['step']} of {decided.get('total_steps', '?')}"
    yield "loss", f"{train[0]['loss']:.4g} -> {last['loss']:.4g}"
    if valid:
        yield "validation", _numbers(valid[-1])
        best = read_last_best(folder).get("step")
        for row in [row for row in valid if row["step"] == best][-1:]:
            yield "best", f"{_numbers(row)} at step {row['step']}"
    if pictures := pictures_of(folder.path):
        yield "pictures", ", ".join(str(p.relative_to(folder.path)) for p in pictures)


def _numbers(row: Mapping[str, Any]) -> str:
    values = {name: value for name, value in row.items() if name not in ("kind", "step")}
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items())
