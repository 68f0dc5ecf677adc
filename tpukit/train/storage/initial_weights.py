"""The weights that a new run begins with: another run's (`init_from`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import nn

from tpukit.errors import CheckpointError
from tpukit.train.storage.run_folder import TrainedRun, open_run
from tpukit.train.storage.state_dict import load_weights
from tpukit.train.task import Task


def open_initial_run(task: Task, source: str, log: Callable[[str], None]) -> TrainedRun:
    """The run that `init_from` names. Raises CheckpointError for another task."""
    try:
        run = open_run(Path(source), log)
    except CheckpointError as error:
        hint = "Give the folder of a run, or one of its checkpoints."
        raise CheckpointError(f"--init-from: {error.message}", hint) from error
    if run.task != task.name:
        raise CheckpointError(
            f"--init-from {source} is a run of task {run.task!r}, not {task.name!r}.",
            "Copy what fits in the task's `initialize(model, data)`, from"
            f" `tpukit.load({source!r}).weights()`.",
        )
    return run


def load_initial_weights(model: nn.Module, task: Task, source: str) -> None:
    """Loads another run's best (EMA) weights. Raises CheckpointError naming what does not fit."""
    weights = open_initial_run(task, source, lambda line: None).weights()
    hint = (
        "Give the settings of its model, or copy what fits in the task's `initialize(model, data)`,"
        f" from `tpukit.load({source!r}).weights()`."
    )
    load_weights(model, weights, f"--init-from {source}", hint)
