"""The protocol of a task: what is learned.

The engine never names a task. A task builds its model and datasets from its own config and turns a
batch into a loss; everything else has a default in `Task`, or is one of `OptionalMethods`.
"""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeGuard, final

import numpy as np
import torch
from torch import Tensor, nn

from tpukit.errors import UsageError
from tpukit.hardware.backend import (
    AdamSettings,
    Backend,
    Batch,
    ModelOps,
    OptimizerSettings,
    ParameterGroup,
    TorchOps,
)
from tpukit.hardware.optimizers import MasterAdamW
from tpukit.train import schedule
from tpukit.train.checks import described, expect, task_mistake
from tpukit.train.config import TaskSettings, build_settings
from tpukit.train.data import (
    VALIDATION_EPOCH,
    BatchPlan,
    MicroBatch,
    PlanSettings,
    Sample,
    SampleKey,
    SampleSource,
    ShuffledPlan,
    global_draws,
    is_stream,
    named,
    sample_rng,
    seeded_generators,
    stack_samples,
)
from tpukit.train.module_state import load_weights
from tpukit.train.streams import StreamPlan, part_of_rank

if TYPE_CHECKING:
    from tpukit.train.config import TrainConfig
    from tpukit.train.optional_methods import OptionalMethods
    from tpukit.train.requests import PredictionRequest
    from tpukit.train.target import Target

__all__ = [
    "VALIDATION_EPOCH",
    "AdamSettings",
    "BatchPlan",
    "Datasets",
    "MasterAdamW",
    "MicroBatch",
    "OptimizerSettings",
    "ParameterGroup",
    "PlanSettings",
    "Preset",
    "Sample",
    "SampleKey",
    "SampleSource",
    "ShuffledPlan",
    "Task",
    "TrainingDefaults",
    "load_weights",
    "named",
    "sample_rng",
    "seeded_generators",
    "stack_samples",
]


@dataclass(frozen=True)
class Datasets:
    """The data of a run; `valid` is None without validation data."""

    train: Any
    """A SampleSource, or a stream: a torch IterableDataset, or any iterable without a length."""
    valid: SampleSource | Mapping[str, SampleSource] | None
    """A data set, or several by name."""
    artifacts: Mapping[str, bytes] = field(default_factory=dict)
    """Small files that a run must keep to be used elsewhere (normalisation, tokenizer), by name."""
    identity: Mapping[str, Any] = field(default_factory=dict)
    """Plain values that identify the data (a digest of its content): a resumed run must have the
    same."""
    ids: Sequence[str] = ()
    """Ids of the validation samples in out-of-fold predictions (default: their numbers)."""

    def validation_sets(self) -> dict[str, SampleSource]:
        """Validation data sets by name; an unnamed one has the name ""."""
        if isinstance(self.valid, Mapping):
            return dict(self.valid)
        return {} if self.valid is None else {"": self.valid}


@dataclass(frozen=True)
class TrainingDefaults(TaskSettings):
    """A task's own defaults where the user and the preset say nothing."""

    rows_per_device: int | None = None
    """Largest micro-batch of a device that the task asks for; None: as large as memory holds."""
    adam: AdamSettings = field(default_factory=AdamSettings)


@dataclass(frozen=True)
class Preset:
    """What a preset sets for a task, in addition to what it sets for any."""

    train: Mapping[str, Any] = field(default_factory=dict)
    """Fields of TrainConfig."""
    task: Mapping[str, Any] = field(default_factory=dict)
    """The task's own options."""


REMOVED_MEMBERS = {
    "accumulate": "name it `validation_rows`",
    "example_batches": "name it `probe_batches(self, settings)`: `settings.micro_rows` rows",
    "artifacts": "return Datasets(train, valid, artifacts) from `datasets`",
    "restore_artifacts": "define `restore(artifacts)`, which returns a task that uses them",
}
"""Methods of earlier versions and their replacements."""


def _keeping_settings(init: Callable[..., None]) -> Callable[..., None]:
    """The constructor, which leaves its arguments in the task: a run records them."""
    signature = inspect.signature(init)

    @functools.wraps(init)
    def keeping(task: Task, *arguments: Any, **settings: Any) -> None:
        init(task, *arguments, **settings)
        given = signature.bind(task, *arguments, **settings).arguments
        _, *names = given
        task.given_settings = {name: given[name] for name in names}
        for name in names:
            if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
                task.given_settings |= task.given_settings.pop(name)

    return keeping


def _drawing_alike(datasets: Callable[[Task], Datasets]) -> Callable[[Task], Datasets]:
    """The method, whose random split is the same in each rank, each resumed run and `test`."""

    @functools.wraps(datasets)
    def alike(task: Task) -> Datasets:
        with global_draws(0):
            return datasets(task)

    return alike


class Task(ABC):
    """What is learned. A user's own task subclasses this; `docs/own_task.py` is one.

    A task's constructor takes keyword arguments that `--set name=value` and the `[task]` table of a
    config file fill; it opens no file and builds no model.
    """

    name: str
    options: ClassVar[type[Any] | None] = None
    """The settings: a frozen dataclass whose fields are options of `train` and `probe-batch`, its
    docstrings their help; the constructor takes them by name. Types, choices (`Literal`) and ranges
    are checked, and a method `problems` may say in sentences what else is wrong. Read from the
    source, as are the attributes below: a class that the task's file defines or imports by name."""
    test_options: ClassVar[type[Any] | None] = None
    """The same for `test`: built, it is `request.options` of `evaluate`."""
    predict_options: ClassVar[type[Any] | None] = None
    """The same for `predict`."""
    folder: ClassVar[str | None] = None
    """The run folder where --results-dir names none; None: results/NAME."""
    data_files: ClassVar[tuple[str, ...]] = ()
    """Globs of names, in small letters, of files that only its data has: `--data-path` alone then
    names an installed task."""
    data_columns: ClassVar[tuple[tuple[str, ...], ...]] = ()
    """The same by the columns of a table, in small letters: each entry has all of them."""
    data_needs: ClassVar[str] = ""
    """Its data in a few words, for the message where a data path is of no task."""
    generators: ClassVar[Mapping[str, type[Any]]] = MappingProxyType({})
    """Synthetic data sets by name: `tpukit data NAME`; see `docs/own_task.md`."""
    metric_names: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Metric in JSON -> its name in tables; `↑` or `↓` at the end says which way is better."""
    selftest: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Settings with which `doctor --selftest` compares a step with the CPU's; empty: none."""
    selftest_parts: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Further parts of the self-test by name: the settings, over those of `selftest`, with which it
    is the task of `shard`, `prediction` or `largest-batch`, or a part of its own, a class with
    `seconds` (its time limit) and `run(backend)`, whose docstring is the label."""
    source: ClassVar[str | None] = None
    """Origin of a user's class, `FILE:CLASS`; set by the loader."""
    defaults: TrainingDefaults = TrainingDefaults()
    presets: ClassVar[Mapping[str, Preset]] = {}
    """Presets by name: quick, safe, balanced, fast."""
    earlier_names: ClassVar[tuple[str, ...]] = ()
    """Names of the task in earlier versions, which recorded runs have."""
    earlier_settings: ClassVar[Mapping[str, str]] = {}
    """Settings of earlier versions, and what there is instead; older runs record them."""
    cpu_preset: ClassVar[str | None] = None
    """Preset of a run on a CPU for which neither a preset nor a setting that it sets is given."""
    predicts: Target | None = None
    """What is predicted, for out-of-fold predictions, known once `datasets` was called."""
    given_settings: Mapping[str, Any] = MappingProxyType({})
    """The constructor's arguments; kept where it is called."""
    known_samples: int | None = None
    """Number of training samples, once the data was opened."""
    seen_samples: int | None = None
    """Number of them whose sizes were compared for `probe_batches`; None: all are alike."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        for removed, instead in REMOVED_MEMBERS.items():
            if removed in vars(cls):
                raise TypeError(f"{cls.__name__}.{removed} is no longer called: {instead}")
        if "__init__" in vars(cls):
            cls.__init__ = _keeping_settings(cls.__init__)  # type: ignore[method-assign]
        if "datasets" in vars(cls):
            cls.datasets = _drawing_alike(cls.datasets)  # type: ignore[assignment, method-assign]

    def __init__(self, **settings: Any) -> None:
        """Settings are the fields of `options`; `self.settings` are they, checked."""
        self.given_settings = settings
        if self.options is None:
            for name in settings:
                raise TypeError(f"{type(self).__name__} has no setting {name!r}")
        else:
            self.settings = build_settings(self.options, settings)

    # -- what must be given -----------------------------------------------------------------------
    @abstractmethod
    def build_model(self, ops: ModelOps) -> nn.Module:
        """The model on the CPU, freshly initialised from torch's seeded generator."""

    @abstractmethod
    def datasets(self) -> Datasets:
        """Opens the data. Raises `DataError` naming file and field.

        The generators of Python, NumPy and torch begin alike in each call: a random split is the
        same for every rank and command.
        """

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """`{"loss": ..., ...}` of one batch, each value of shape (rows,) or 0-d.

        (rows,): each row's own loss; masked rows (`batch["mask"]` 0) are left out by the engine.
        0-d: a mean over the batch. `"weight"`, of the same shape as the loss, says how much each
        counts (default 1 a row): the step minimises sum(weight loss) / sum(weight) over all its
        micro-batches and devices. Other entries are logged, weighted alike.
        """

    # -- what has a default -----------------------------------------------------------------------
    def after_step(self, model: nn.Module) -> None:
        """Moves what is not trained, once an optimizer step: an EMA teacher, a queue, prototypes.

        Called without gradients when the weights have moved, before the EMA weights are updated,
        on every rank; all ranks draw alike there. What is saved of it are parameters, buffers and
        extra state of the model; buffers are then those of rank 0, so gather first what each rank
        computes of its own rows.
        `loss` is called once a micro-batch, also in validation: there these would move with it.
        """

    def identity(self) -> dict[str, Any]:
        """Plain values that decide the arithmetic: a resumed run must have the same."""
        return {}

    def restore(self, artifacts: Mapping[str, bytes]) -> Self:
        """A task that uses a run's artifacts instead of what opening the data would give.

        A resumed run, `test` and `predict` go on with the task returned here.
        """
        return self

    def initialize(self, model: nn.Module, data: Datasets) -> None:
        """Sets initial weights that depend on the data: called once, for a new run, on the CPU."""

    def parameter_groups(self, model: nn.Module, weight_decay: float) -> list[ParameterGroup]:
        """Groups for the optimizer: weight decay on matrices only."""
        trained = [p for p in model.parameters() if p.requires_grad]
        return [
            ParameterGroup([p for p in trained if p.ndim >= 2], weight_decay),
            ParameterGroup([p for p in trained if p.ndim < 2], 0.0),
        ]

    def build_optimizer(
        self, groups: Sequence[ParameterGroup], settings: OptimizerSettings
    ) -> torch.optim.Optimizer | None:
        """An optimizer over these groups; None: the one that the setting `optimizer` names.

        `torch.optim.SGD(groups, settings.lr, momentum=0.9)`. The rate that it is built with is each
        group's peak: the schedule scales it.
        """
        return None

    def learning_rate(self, step: int, total_steps: int, config: TrainConfig) -> float:
        """The rate of optimizer step `step` (from 0) out of `total_steps`."""
        return schedule.learning_rate(step, total_steps, config)

    def draw(self, sample: Sample, rng: np.random.Generator) -> Sample:
        """Adds a sample's own random draws; `rng` is keyed by (seed, epoch, index)."""
        return sample

    def collate(self, samples: Sequence[Sample], micro: MicroBatch) -> Batch:
        """Stacks samples to exactly `micro.rows` rows plus `mask` (rows,), 0 on filled rows."""
        return stack_samples(samples, micro.rows)

    def plan(self, data: Any, settings: PlanSettings) -> BatchPlan:
        """Which samples make up an optimizer step: shuffled passes, or a stream as it comes."""
        return StreamPlan(data, settings) if is_stream(data) else ShuffledPlan(len(data), settings)

    def shard(self, stream: Any, rank: int, world_size: int) -> Any:
        """A rank's part of the training stream, which it reads alone; None: every rank reads all of
        it and keeps its rows. By default those of datasets and WebDataset are split."""
        return part_of_rank(stream, rank, world_size)

    def evaluation_batches(
        self, data: SampleSource, settings: PlanSettings
    ) -> Iterator[MicroBatch]:
        """Every sample once, in order, in micro-batches of training's size."""
        rows = settings.micro_rows
        for start in range(0, len(data), rows):
            stop = min(start + rows, len(data))
            yield MicroBatch(
                tuple(SampleKey(VALIDATION_EPOCH, i) for i in range(start, stop)), rows
            )

    def probe_batches(self, settings: PlanSettings) -> list[Batch]:
        """Host batches of each shape that training uses, of `settings.micro_rows` rows, the
        costliest first.

        Default: one sample of the training data repeated, for each shape in the first steps of the
        plan; where `collate` makes batches of any size, the largest of 4,096 samples
        (`loader.example_batches`). Override it to probe where the data is not at hand.
        """
        raise NotImplementedError("Task.probe_batches: `super()` has none; leave the method out")

    def validation_rows(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """What `compute` needs of one validation batch, each value of shape (rows, ...)."""
        return {}

    def compute(self, rows: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, float]:
        """Validation metrics that are not means over rows (AUC, F1, mAP).

        rows: what `validation_rows` gave for every validation sample, over all ranks, of shape
        (samples, ...), in the order of the data.
        """
        return {}

    def on_log(self, row: Mapping[str, Any]) -> None:
        """Called on rank 0 with each line of metrics.jsonl: a place for one's own tracker.

        An exception raised here is one warning, and training goes on.
        """

    # -- a trained run ----------------------------------------------------------------------------
    def inference_model(self, ops: ModelOps, weights: Mapping[str, Tensor]) -> nn.Module:
        """The model on the CPU with a run's weights, as `evaluate` and `predict` use it."""
        model = self.build_model(ops)
        load_weights(model, weights, "the checkpoint")
        return model

    @final
    def plain_model(self, weights: Mapping[str, Tensor]) -> nn.Module:
        """The model with these weights, of plain torch on the CPU, in eval mode."""
        return self.inference_model(TorchOps(), weights).eval()

    def predict(
        self,
        model: nn.Module,
        backend: Backend,
        request: PredictionRequest,
        log: Callable[[str], None],
    ) -> dict[str, Any]:
        """Writes predictions to `request.out`; the JSON fields of `tpukit predict`.

        `model` is prepared, in eval mode, and holds the run's best (EMA) weights. Every rank calls
        this; only rank 0 writes files. `log` prints a line for people.
        """
        raise UsageError(
            f"task {self.name!r} has no `predict`.",
            "Add `def predict(self, model, backend, request, log)` to the task class;"
            " docs/own_task.py has one.",
        )


def overrides(task: Task, method: str) -> TypeGuard[OptionalMethods]:
    """Whether the task's class has a method of its own: instead of the default of `Task`, or one
    of `OptionalMethods`."""
    return getattr(type(task), method, None) is not getattr(Task, method, None)


def for_probing(task: Task) -> Task:
    """The task where only shapes matter."""
    return task.for_probing() if overrides(task, "for_probing") else task


def as_recorded(task: Task, identity: Mapping[str, Any]) -> Task:
    """The task with the settings of an older run, whose checkpoint has this identity."""
    return task.as_recorded(identity) if overrides(task, "as_recorded") else task


def restored(task: Task, artifacts: Mapping[str, bytes]) -> Task:
    """The task that uses a run's artifacts. Raises UsageError where `restore` gives none."""
    found = task.restore(artifacts)
    return expect(found, Task, task.restore, "a task (`self`)")  # type: ignore[type-abstract]


def forms_of(task: Task) -> Sequence[Task]:
    """The task's `forms`. Raises UsageError where they are not tasks."""
    if not overrides(task, "forms"):
        return (task,)
    forms: Any = task.forms()
    if (
        not isinstance(forms, list | tuple)
        or not forms
        or not all(isinstance(f, Task) for f in forms)
    ):
        raise task_mistake(
            task.forms, f"returned {described(forms)}", "Return a list of tasks, one at the least."
        )
    return forms


def chosen_settings(task: Task, form: Task) -> dict[str, Any]:
    """The settings of one of a task's `forms` that are not the task's."""
    own, given = task.given_settings, form.given_settings
    return {n: value for n, value in given.items() if n not in own or own[n] != value}


def form_name(task: Task, form: Task) -> str:
    """The settings of a form, as logs and reports name it."""
    settings = chosen_settings(task, form).items()
    return ", ".join(f"{name} = {value}" for name, value in settings)
