"""A trained run opened for use: its task restored, its best weights on a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from tpukit.errors import CheckpointError
from tpukit.hardware.backend import Backend
from tpukit.tasks.registry import BUILT_IN, find_task, make_task
from tpukit.train.mistakes.returned import expect
from tpukit.train.storage.run_folder import TrainedRun, open_run
from tpukit.train.task import Task


@dataclass(frozen=True)
class TrainedTask:
    """A task and the weights to use it with: a run's, or a checkpoint file's of other code."""

    task: Task
    run: TrainedRun | None = None
    checkpoint: Path | None = None

    def model(self, backend: Backend) -> nn.Module:
        """The model with the best (EMA) weights on its device, in eval mode."""
        if self.run is not None:
            weights = self.run.weights()
        else:
            assert self.checkpoint is not None, "a trained task has a run or a checkpoint file"
            weights = self.task.read_checkpoint_file(self.checkpoint)
        return backend.prepare(self.task.inference_model(backend, weights), train=False).eval()


def open_trained(
    path: Path,
    log: Callable[[str], None],
    spec: str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> TrainedTask:
    """Opens a run folder, or one checkpoint folder in it.

    spec: the task's `FILE:CLASS`, where it is not the one that the run recorded.
    settings: of the task; they override the run's.

    Raises `CheckpointError` where there is no run, or its task cannot be found.
    """
    run = open_run(path, log)
    cls = find_task(spec or _recorded_spec(run))
    if cls.name != run.task:
        raise CheckpointError(
            f"{run.path} is a run of task {run.task!r}, not {cls.name!r}.",
            "Name its own task with --task, or another run with --run DIR.",
        )
    data_path = str(run.train_config.get("data_path", "./data"))
    task = make_task(cls, {**run.task_config, **(settings or {})}, data_path)
    restored = task.restore(run.checkpoint.artifacts())
    expect(restored, Task, task.restore, "a task (`self`)")  # type: ignore[type-abstract]
    return TrainedTask(restored, run)


def _recorded_spec(run: TrainedRun) -> str:
    """What `find_task` takes for the run's task."""
    if run.source is None:
        if run.task in BUILT_IN:
            return run.task
        raise CheckpointError(
            f"{run.path} is a run of task {run.task!r} and does not record the file of its class.",
            "Name it with --task FILE:CLASS.",
        )
    file = Path(run.source.rpartition(":")[0])
    if not file.is_file():
        raise CheckpointError(
            f"The file of task {run.task!r} is not at {file} any more.",
            "Name its new place with --task FILE:CLASS.",
        )
    return run.source
