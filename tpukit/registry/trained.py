"""A trained run opened for use: its task restored, its best weights on a device."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from tpukit.errors import CheckpointError, UsageError
from tpukit.hardware.backend import Backend
from tpukit.registry.classes import SESSION, default_data_path, find_task, make_task, own_class
from tpukit.registry.declared import current_name, registered
from tpukit.train.data import seeded_generators
from tpukit.train.learner import MASK_63
from tpukit.train.run_folder import TrainedRun, open_run, read_config
from tpukit.train.task import Task, as_recorded, overrides, restored
from tpukit.train.weights import export


@dataclass(frozen=True)
class TrainedTask:
    """A task and the weights to use it with: a run's, or a checkpoint file's of other code."""

    task: Task
    run: TrainedRun | None = None
    checkpoint: Path | None = None

    @cached_property
    def model(self) -> nn.Module:
        """The model with the best (EMA) weights: a module of plain torch on the CPU, in eval mode.

        It keeps no hold on tpukit's devices: `.to("cuda")` and `copy.deepcopy` work as ever.
        """
        weights = self.weights()
        with self._draws_of_training():
            return self.task.plain_model(weights)

    @property
    def config(self) -> dict[str, Any]:
        """The tables of the run's config.toml: train, task, decided, versions."""
        return read_config(self.run.folder) if self.run else {}

    def weights(self) -> dict[str, Any]:
        """The best (EMA) weights by name, on the CPU."""
        if self.run is not None:
            return self.run.weights()
        assert self.checkpoint is not None, "a trained task has a run or a checkpoint file"
        if not overrides(self.task, "read_checkpoint_file"):
            raise UsageError(
                f"task {self.task.name!r} reads no checkpoint files.",
                "Give a run folder with --run DIR.",
            )
        return self.task.read_checkpoint_file(self.checkpoint)

    def export(self, folder: str | Path) -> list[Path]:
        """Writes the weights for use without tpukit; the files."""
        artifacts = self.run.checkpoint.artifacts() if self.run else {}
        return export(self.task, self.weights(), artifacts, Path(folder))

    def _draws_of_training(self) -> AbstractContextManager[None]:
        """Around the making of the model: what it draws and keeps beside its state dict (a random
        projection as a plain attribute) is what the run drew."""
        seed = int(self.run.train_config.get("global_seed", 0)) if self.run else 0
        return seeded_generators(seed, seed % 2**32, seed & MASK_63)

    def model_on(self, backend: Backend) -> nn.Module:
        """The model as the hardware of a backend runs it best, on its device, in eval mode."""
        weights = self.weights()
        with self._draws_of_training():
            model = self.task.inference_model(backend, weights)
        return backend.prepare(model, train=False).eval()


def open_trained(
    path: str | Path,
    log: Callable[[str], None],
    task: str | type[Task] | Task | None = None,
    settings: Mapping[str, Any] | None = None,
) -> TrainedTask:
    """Opens a run folder, or one checkpoint folder in it.

    task: `FILE:CLASS`, a class or an object, where it is not what the run recorded.
    settings: of the task; they override the run's.

    Raises `CheckpointError` where there is no run, or its task cannot be found.
    """
    run = open_run(path, log)
    if isinstance(task, Task):
        cls = own_class(type(task))
    else:
        cls = own_class(task) if isinstance(task, type) else find_task(task or _recorded_spec(run))
    if run.task not in (cls.name, *cls.earlier_names):
        raise CheckpointError(
            f"{run.folder.shown} is a run of task {run.task!r}, not {cls.name!r}.",
            "Name its own task with --task, or another run with --run DIR.",
        )
    if not isinstance(task, Task):
        data_path = str(run.train_config.get("data_path", default_data_path(cls)))
        own = {n: v for n, v in run.task_config.items() if n not in cls.earlier_settings}
        task = make_task(cls, {**own, **(settings or {})}, data_path)
        task = as_recorded(task, run.checkpoint.state.identity)
    return TrainedTask(restored(task, run.checkpoint.artifacts()), run)


def open_checkpoint_file(
    path: Path, task: str | type[Task] | Task, settings: Mapping[str, Any]
) -> TrainedTask:
    """A checkpoint file of other code as a task reads it."""
    if not isinstance(task, Task):
        cls = task if isinstance(task, type) else find_task(task)
        task = make_task(cls, settings, default_data_path(cls))
    return TrainedTask(task, checkpoint=path)


def _recorded_spec(run: TrainedRun) -> str:
    """What `find_task` takes for the run's task."""
    place = (run.source or "").partition(":")[0]
    if run.source is not None and (place == SESSION or Path(place).exists()):
        return run.source
    if (name := current_name(run.task)) in registered():
        return name
    if run.source is None:
        raise CheckpointError(
            f"{run.folder.shown} is a run of task {run.task!r} and does not record the file of its"
            " class.",
            "Name it with --task FILE:CLASS.",
        )
    raise CheckpointError(
        f"The file of task {run.task!r} is not at {place} any more.",
        "Name its new place with --task FILE:CLASS.",
    )
