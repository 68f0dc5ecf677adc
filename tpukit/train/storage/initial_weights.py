"""The weights that a run begins with: a checkpoint's, another run's (`init_from`), the task's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import nn

from tpukit.errors import CheckpointError
from tpukit.hardware.backend import Backend
from tpukit.train.config import TrainConfig
from tpukit.train.mistakes.returned import MODEL, expect
from tpukit.train.storage.checkpoint import Checkpoint
from tpukit.train.storage.run_folder import TrainedRun, open_run
from tpukit.train.storage.state_dict import load_weights
from tpukit.train.task import Datasets, Task


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


def initial_model(
    task: Task,
    backend: Backend,
    config: TrainConfig,
    checkpoint: Checkpoint | None = None,
    data: Datasets | None = None,
) -> nn.Module:
    """The model on the CPU with a checkpoint's weights, another run's or the task's own.

    data: None where only shapes matter (a memory trial).

    Raises CheckpointError naming what does not fit.
    """
    model = expect(task.build_model(backend), nn.Module, task.build_model, MODEL)
    if checkpoint is not None:
        load_weights(model, checkpoint.tensors("model"), str(checkpoint.path))
    elif data is not None and (source := config.init_from) is not None:
        hint = (
            "Give the settings of its model, or copy what fits in the task's"
            f" `initialize(model, data)`, from `tpukit.load({source!r}).weights()`."
        )
        weights = open_initial_run(task, source, lambda line: None).weights()
        load_weights(model, weights, f"--init-from {source}", hint)
    elif data is not None:
        task.initialize(model, data)
    return model
