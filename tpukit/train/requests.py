"""What the commands ask of a trained task, and what a training run ends with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from tpukit.hardware.backend import Backend
    from tpukit.train.storage.run_folder import TrainedRun


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
    task: object
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
