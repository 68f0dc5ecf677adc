"""What a run is asked to do, and its data, batches and steps, decided before the first one."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from tpukit.errors import CheckpointError, ConfigError, DataError, JobError, UsageError
from tpukit.hardware.backend import Backend, Batch
from tpukit.hardware.memory import is_out_of_memory
from tpukit.hardware.prefetch import loader_workers
from tpukit.io.process import WorkerInit
from tpukit.train.batch_size import (
    BatchSplit,
    PredictCosts,
    fit_to_memory,
    sample_operations,
    split_batch,
)
from tpukit.train.checks import check_batch_plan, expect, sample_count
from tpukit.train.config import ARITHMETIC, TrainConfig
from tpukit.train.data import is_stream
from tpukit.train.loader import (
    LoaderSettings,
    PlannedMicroBatches,
    SeeBatch,
    StepBatches,
    example_batches,
    make_loader,
    standing_workers,
)
from tpukit.train.metric_names import parse_metrics
from tpukit.train.report.tested import METRIC_NAMES
from tpukit.train.run_folder import RunFolder, read_config, run_folder
from tpukit.train.schedule import BestMetric, completes_pass, is_due, parse_best_metric
from tpukit.train.streams import StreamPlan
from tpukit.train.task import BatchPlan, Datasets, PlanSettings, Task, overrides

DEFAULT_CKPT_EVERY = 500
"""Maximum number of steps between two checkpoints where none is given."""


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
    predict_costs: PredictCosts | None = None
    """None: a step is not cut for lack of memory, and a task's form is its last."""

    def remarks(self) -> list[str]:
        """What was chosen for the user, and what is not kept, a line each."""
        given = {name for name, value in self.task.given_settings.items() if value is not None}
        if lost := ", ".join(sorted(given - {*self.task_settings, "data_path"})):
            return [
                f"Warning: config.toml cannot hold {lost} of {type(self.task).__name__}: give"
                " `evaluate`, `predict` and `load` of this run the object, task=..."
            ]
        if self.chosen_preset is None:
            return []
        values = ", ".join(f"{name} {value}" for name, value in self.task_settings.items())
        return [f"On a CPU the default is --preset {self.chosen_preset} ({values})."]

    @property
    def run_folders(self) -> list[Path]:
        """The run's own folder, and the one that it goes on from."""
        source = self.config.resume_from
        return [self.folder.path, *([run_folder(source).path] if source else [])]


@dataclass(frozen=True, kw_only=True)
class RunPlan(TrainingRequest):
    """The request with what is decided before the first step, the same in every rank."""

    datasets: Datasets
    batches: BatchPlan
    split: BatchSplit
    settings: PlanSettings
    total_steps: int
    best: BestMetric
    identity: dict[str, Any]
    loading: LoaderSettings
    steps_per_pass: Fraction | None = None
    """Optimizer steps of a pass over the data after which the run validates and saves."""
    operations_per_sample: Callable[[], float | None] = lambda: None
    """Floating-point operations of a training step for each sample; the first call may wait for
    them. None if unknown."""
    choice: tuple[str, str] | None = None
    """The name of the form that memory chose among the task's, and the reason."""

    def step_batches(
        self, backend: Backend, start: int, see: SeeBatch | None = None,
        position: bytes | None = None,
    ) -> StepBatches:  # fmt: skip
        """The device batches of the steps from `start` (0 is the first) on."""
        steps = range(start, self.total_steps)
        sampler = PlannedMicroBatches(
            self.batches, steps, backend.rank, backend.world_size,
            lambda done: self.saves_after(done, self.total_steps),
        )  # fmt: skip
        loader = make_loader(self.task, self.datasets.train, sampler, self.loading, see)
        return StepBatches(backend, sampler, loader, position)

    def validation_workers(self) -> AbstractContextManager[LoaderSettings]:
        """See `standing_workers`."""
        return standing_workers(self.task, self.datasets.validation_sets().values(), self.loading)

    def rate(self, step: int) -> float:
        """The learning rate of step `step` (from 0), as the task has it."""
        rate = float(self.task.learning_rate(step, self.total_steps, self.config))
        if not 0 <= rate < math.inf:
            raise UsageError(
                f"{type(self.task).__name__}.learning_rate gave {rate} for step {step}.",
                "Return a finite number that is not negative.",
            )
        return rate

    @staticmethod
    @contextmanager
    def errors_of_step(number: int) -> Iterator[None]:
        """Names the step (from 1) in errors of memory and of devices."""
        try:
            yield
        except Exception as error:
            if is_out_of_memory(error) or isinstance(error, JobError):
                error.add_note(f"in step {number}")
            raise

    def logs_after(self, done: int) -> bool:
        """Whether the run logs its metrics after step `done` (from 1)."""
        return is_due(done, self.config.log_every, self.total_steps)

    def stops_early(self, since_best: int) -> bool:
        """Whether `since_best` validations without a better metric end the run."""
        patience = self.config.early_stopping
        return bool(patience) and since_best >= (patience or 0)

    def saves_after(self, done: int, total: int) -> bool:
        """Whether the run validates and saves after step `done` (from 1); `total`: the last."""
        if is_due(done, self.config.ckpt_every or DEFAULT_CKPT_EVERY, total):
            return True
        return (
            self.steps_per_pass is not None
            and done > 0
            and completes_pass(done, self.steps_per_pass)
        )


def plan_run(request: TrainingRequest, backend: Backend, *, resumes: bool = False) -> RunPlan:
    """Opens the data and does the arithmetic of batches and steps.

    resumes: a run that goes on keeps its form and its micro-batches on the same hardware.
    """
    task, config = request.task, request.config
    if not backend.is_main:
        backend.all_gather_objects(None)  # rank 0 builds caches, the others find them
    datasets = expect(
        task.datasets(), Datasets, task.datasets, "Datasets(train, valid); valid may be None"
    )
    if backend.is_main:
        backend.all_gather_objects(None)
    _check_sizes(task, datasets, config)

    def examples(rows: int) -> list[Batch]:
        settings = PlanSettings(rows, rows, 1, config.global_seed, compiles=backend.compiles)
        return example_batches(task, settings, datasets.train)

    before: dict[str, Any] = {}
    if resumes:
        before = backend.all_gather_objects(decided_before(request.folder, backend))[0]
    split = _split(request, backend, before.get("accumulate"))
    # Before this process computes a gradient: where it has GPUs, a fork of it could not then.
    operations = sample_operations(split, task, config, backend, examples, request.predict_costs)
    cuts = not split.reason and task.defaults.rows_per_device is None
    task, split, choice = fit_to_memory(
        split, task, config, backend, examples, request.predict_costs,
        cuts=cuts, before=before.get("form"),
    )  # fmt: skip
    settings = PlanSettings(
        config.global_batch_size, split.micro_rows, backend.devices, config.global_seed,
        compiles=backend.compiles,
    )  # fmt: skip
    batches = check_batch_plan(task.plan(datasets.train, settings), task.plan, backend.devices)
    if isinstance(batches, StreamPlan) and backend.world_size > 1:
        _share_stream(batches, task, datasets, backend)
    total = config.max_steps or math.ceil((config.epochs or 1) * batches.steps_per_epoch())
    return RunPlan(
        **{**vars(request), "task": task},
        datasets=datasets,
        batches=batches,
        split=split,
        settings=settings,
        total_steps=total,
        best=_best_metric(task, config, datasets),
        identity={**_identity(task, config, total), **datasets.identity},
        loading=LoaderSettings(
            workers=loader_workers(backend, config.num_workers),
            seed=config.global_seed,
            start_worker=WorkerInit(),
            timeout=config.loader_timeout,
        ),
        steps_per_pass=None if config.ckpt_every else _steps_per_pass(batches, datasets),
        operations_per_sample=operations,
        choice=choice,
    )


def _share_stream(batches: StreamPlan, task: Task, datasets: Datasets, backend: Backend) -> None:
    """Gives each rank the part of a stream that the task has for it, or its rows of the whole."""
    part = task.shard(datasets.train, backend.rank, backend.world_size)
    if part is None:
        batches.require_alike(backend.all_gather_objects)
    else:
        batches.split(part, backend.rank, backend.world_size)


def _steps_per_pass(batches: BatchPlan, datasets: Datasets) -> Fraction | None:
    """None for a stream, which has no end, and without validation data."""
    if is_stream(datasets.train) or not datasets.validation_sets():
        return None
    return Fraction(batches.steps_per_epoch())


def _split(request: TrainingRequest, backend: Backend, before: int | None) -> BatchSplit:
    """The micro-batches that were asked for, those that the run had, or as few as the task says."""
    config = request.config
    if config.accumulate is None and before is not None:
        split = split_batch(config.global_batch_size, backend.devices, before)
        return replace(split, reason="as the run did before")
    most = request.task.defaults.rows_per_device
    return split_batch(config.global_batch_size, backend.devices, config.accumulate, most)


def decided_before(folder: RunFolder, backend: Backend) -> dict[str, Any]:
    """What the run so far decided, where it ran on this kind and number of devices."""
    try:
        decided: dict[str, Any] = read_config(folder).get("decided", {})
    except CheckpointError:  # imported without one, or damaged
        return {}
    here = {**backend.describe(), "devices": backend.devices}
    same = all(decided.get(name) == here.get(name) for name in ("hardware", "device", "devices"))
    return decided if same else {}


def _check_sizes(task: Task, datasets: Datasets, config: TrainConfig) -> None:
    for name, data in datasets.validation_sets().items():
        sample_count(data, f"validation ({name})" if name else "validation", task.datasets)
    if is_stream(datasets.train):
        return
    samples = sample_count(datasets.train, "training", task.datasets)
    if config.global_batch_size > samples:
        raise DataError(
            f"--global-batch-size {config.global_batch_size} is larger than the training data"
            f" ({samples} samples).",
            f"Choose at most {samples}, or add data.",
        )


def _best_metric(task: Task, config: TrainConfig, datasets: Datasets) -> BestMetric:
    """The configured metric, or the loss on the first validation set."""
    sets = datasets.validation_sets()
    asked = {"early_stopping": config.early_stopping, "metric": config.metric}
    for name, value in asked.items():
        if value and not sets:
            raise ConfigError(
                f"{name} = {value}: the task has no validation data.",
                f"Return some as `Datasets.valid`, or leave {name} out.",
            )
    for first in parse_metrics(config.metric)[:1] if config.best_metric is None else ():
        return BestMetric(validation_name(next(iter(sets)), first.name), first.largest)
    titles = {
        validation_name(part, name): title
        for part in sets
        for name, title in {**METRIC_NAMES, **task.metric_names}.items()
    }
    metric = parse_best_metric(config.best_metric or "", titles)
    return metric or BestMetric(validation_name(next(iter(sets), ""), "loss"))


def validation_name(part: str, metric: str) -> str:
    """`valid_loss`, `valid_NAME_loss` of the set `part`."""
    return "_".join(filter(None, ("valid", part, metric)))


def _identity(task: Task, config: TrainConfig, total_steps: int) -> dict[str, Any]:
    own = expect(task.identity(), dict, task.identity, "a dict of plain values")
    values = {"task": task.name, **own}
    values |= {name: getattr(config, name) for name in ARITHMETIC}
    if config.schedule != "constant" or overrides(task, "learning_rate"):
        # The rate depends on how long the run is.
        values["total_steps"] = total_steps
    if config.sync_batchnorm:
        values["sync_batchnorm"] = True
    return values
