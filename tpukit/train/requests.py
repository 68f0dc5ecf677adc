"""What the commands ask of a trained task, and what a training run ends with."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tpukit.errors import ConfigError
from tpukit.io.ranges import BATCH, COUNT, SEED, setting
from tpukit.train.metric_names import MetricName, parse_metrics

if TYPE_CHECKING:
    from tpukit.train.run_folder import TrainedRun

Chosen = TypeVar("Chosen")


@dataclass(frozen=True)
class TrainingResult:
    """What a training run ended with; the fields of `--json`."""

    steps: int
    loss: float | None
    best: dict[str, float]
    run: str
    resumed_from: int | None
    finished: bool
    samples_per_second: float = 0.0
    compilations: int = 0
    compilations_after_warmup: int = 0
    graphs: dict[str, int] = field(default_factory=dict)
    """Compilations by activity: start, train, evaluate, read, ..."""
    data_waiting: float = 0.0
    """Part of the training time that the host waited for data."""
    mfu: float | None = None
    """Part of the devices' peak operations a second that the model took; None where unknown."""
    stopped_early: bool = False
    """Whether `early_stopping` ended the run."""

    def __fspath__(self) -> str:
        """The run folder: `Path(result)` is it."""
        return self.run


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """The options of `tpukit test`; None was not given."""

    data: str | None = None
    """Data set: a name that the task knows, or a path."""
    data_path: Path | None = None
    """Folder the data lies in (the run's, else ./data)."""
    metric: str | None = None
    """Metrics by name, separated by commas, as `tpukit train --metric` takes them (the run's)."""
    limit: int | None = setting(None, COUNT)
    """At most N samples, evenly from all of them."""
    batch_size: int | None = setting(None, BATCH)
    """Samples in a batch, over all devices."""
    seed: int = setting(0, SEED)
    """Seed of the sampling."""
    out: Path | None = None
    """Folder for predictions and pictures (in the run folder)."""

    def chosen(self, samples: Sequence[Chosen]) -> list[Chosen]:
        """At most `limit` of the samples, evenly: the first may all be of one class."""
        total = len(samples)
        count = min(total, self.limit or total)
        return [samples[(2 * place + 1) * total // (2 * count)] for place in range(count)]


@dataclass(frozen=True)
class EvaluationRequest(EvaluationOptions):
    """What a task's `evaluate` is asked."""

    run: TrainedRun | None = None
    """The run whose best weights are evaluated."""
    checkpoint: Path | None = None
    """A checkpoint file of other code, instead of a run."""
    options: Any = None
    """What the task declares as `test_options`, with the values that were given."""
    data_address: str | None = None
    """The address that `data_path` is a copy of."""

    def metrics(self) -> list[MetricName]:
        """The metrics by name that were asked for, or those of the run."""
        of_run = self.run.train_config.get("metric") if self.run else None
        return parse_metrics(self.metric or of_run)

    def named(self, data: str | Path = "") -> str:
        """A data set's name in results: `data`, below a data path that is not the run's."""
        given = Path(self.data_address) if self.data_address else self.data_path
        own = Path(self.run.train_config.get("data_path", "")) if self.run else given
        return str(data if given in (None, own) else given / data)

    def folder(self, data: str | Path = "") -> Path:
        """`out`, or a folder of the run's for the results on a data set: `test-valid`, and with the
        whole path `test-a-valid` for a/valid, or for valid of `--data-path a`."""
        parts = ("test", *(part for part in Path(self.named(data)).parts if part != os.sep))
        home = self.run.path if self.run else Path("results")
        return self.out or home / "-".join(parts)


@dataclass(frozen=True, kw_only=True)
class PredictionOptions:
    """The options of `tpukit predict`; None was not given."""

    test_csv: Path | None = None
    """File whose rows are predicted (the data path's test.csv)."""
    out: Path | None = None
    """File to write (default: the task's own name)."""
    sample_submission: Path | None = None
    """A file whose columns, ids and order the submission must have."""
    data_path: Path | None = None
    """Folder or file to predict (default: the run's)."""
    weights: str | None = None
    """Weights of several --run in their mean, separated by commas (default: equal); a folder of
    folds counts as one."""

    def shares(self, runs: int) -> list[float] | None:
        """`weights` as numbers. Raises ConfigError where they are not one for each run."""
        if self.weights is None:
            return None
        try:
            shares = [float(text) for text in str(self.weights).split(",")]
        except ValueError:
            shares = []
        if len(shares) != runs or min(shares) < 0 or not sum(shares):
            raise ConfigError(
                f"--weights {self.weights}: expected {runs} numbers of 0 or more, one for each run."
            )
        return shares


@dataclass(frozen=True)
class PredictionRequest(PredictionOptions):
    """What a task's `predict` is asked."""

    run: TrainedRun
    options: Any = None
    """What the task declares as `predict_options`, with the values that were given."""
