"""What the commands ask of the engine and of a task, and what a training run ends with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpukit.train.config import TrainConfig

if TYPE_CHECKING:
    from torch import nn

    from tpukit.hardware.backend import Backend
    from tpukit.train.storage.run_folder import RunFolder, TrainedRun
    from tpukit.train.task import Task


@dataclass(frozen=True)
class TrainingRequest:
    """A training run to make or to resume."""

    task: Task
    config: TrainConfig
    folder: RunFolder
    task_settings: Mapping[str, Any] = field(default_factory=dict)
    """The task's own settings that were given, by options, `--set`, file or preset."""
    spec: str = ""
    """How the user named the task: a registered name or `my_file.py:MyTask`."""
    command: str = "the same command"
    """What the user typed, to print how to resume."""
    chosen_preset: str | None = None
    """The preset that was taken because the hardware is a CPU."""

    def remarks(self) -> list[str]:
        """What was chosen for the user, a line each."""
        if self.chosen_preset is None:
            return []
        values = ", ".join(f"{name} {value}" for name, value in self.task_settings.items())
        return [f"On a CPU the default is --preset {self.chosen_preset} ({values})."]

    @property
    def run_folders(self) -> list[Path]:
        """The run's own folder, and the one that it goes on from."""
        source = self.config.resume_from
        return [self.folder.path, *([Path(source)] if source else [])]


@dataclass(frozen=True)
class TrainingResult:
    """What a training run ended with; the fields of `--json`."""

    steps: int
    loss: float | None
    best: dict[str, float]
    run: str
    samples_per_second: float
    compilations: int
    compilations_after_warmup: int
    graphs: dict[str, int]
    """Compilations by activity: start, train, evaluate, read, ..."""
    resumed_from: int | None
    finished: bool
    data_waiting: float = 0.0
    """Part of the training time that the host waited for data."""
    mfu: float | None = None
    """Part of the devices' peak operations a second that the model took; None where unknown."""
    stopped_early: bool = False
    """Whether `early_stopping` ended the run."""

    def __fspath__(self) -> str:
        """The run folder: `Path(result)` is it."""
        return self.run


@dataclass(frozen=True)
class EvaluationRequest:
    """The options of `tpukit test`; None was not given."""

    run: TrainedRun | None = None
    """The run whose best weights are evaluated."""
    checkpoint: Path | None = None
    """A checkpoint file of other code, instead of a run."""
    data: str | None = None
    """Which data set: a name that the task knows, or a path."""
    data_path: Path | None = None
    """Folder the data lies in; None: the run's own."""
    out: Path | None = None
    """Folder for predictions and pictures; None: in the run folder."""
    limit: int | None = None
    """Only the first `limit` samples."""
    batch_size: int | None = None
    """Global batch size; None: chosen by the task."""
    seed: int = 0
    """Seed of random draws."""
    options: Any = None
    """What the task declares as `test_options`, with the values that were given."""


@dataclass(frozen=True)
class AveragedRun:
    """A further run, whose predictions are averaged with those of the first."""

    run: TrainedRun
    task: Task
    model_on: Callable[[Backend], nn.Module]
    """The model with the run's weights, on a backend's device."""


@dataclass(frozen=True)
class PredictionRequest:
    """The options of `tpukit predict`; None was not given."""

    run: TrainedRun
    data_path: Path | None = None
    """Folder or file to predict; None: the run's own data."""
    test_csv: Path | None = None
    """File whose rows are predicted."""
    out: Path | None = None
    """File to write; None: the task's own name for it."""
    sample_submission: Path | None = None
    """A file whose ids and order the output must have."""
    options: Any = None
    """What the task declares as `predict_options`, with the values that were given."""
    averaged: Sequence[AveragedRun] = ()
    """Runs beside `run`, for tasks that average over several (`Task.averages_runs`)."""
