"""The protocol of a task: what is learned.

The engine never names a task. A task builds its model and datasets from its own config and turns a
batch into a loss; everything else has a default in `Task`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from tpukit.errors import UsageError
from tpukit.hardware.backend import AdamSettings, Backend, Batch, ModelOps, ParameterGroup
from tpukit.train.mistakes.returned import why_not_stacked
from tpukit.train.storage.state_dict import load_weights

if TYPE_CHECKING:
    from tpukit.train.requests import EvaluationRequest, PredictionRequest

Sample = Mapping[str, Any]
"""A dict of arrays (or numbers) of fixed shapes."""


class SampleKey(NamedTuple):
    """Which sample, and in which pass over the data: together they seed its own draws."""

    epoch: int
    sample: int


VALIDATION_EPOCH = 2**31 - 1
"""The epoch of every validation sample: its draws are the same each time."""


@dataclass(frozen=True)
class MicroBatch:
    """The samples of one forward and backward pass, over all ranks until `share` cuts it."""

    keys: tuple[SampleKey, ...]
    rows: int
    """Rows of the batch; those beyond `keys` are filled and masked."""
    shape: Any = None
    """The task's own description of the batch's fixed shape; None where all have the same."""

    def share(self, rank: int, world_size: int) -> MicroBatch:
        """The part of one rank: an equal number of rows, its keys a contiguous run."""
        rows = self.rows // world_size
        keys = self.keys[rank * rows : (rank + 1) * rows]
        return MicroBatch(keys, rows, self.shape)


class SampleSource(Protocol):
    """A map-style dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Sample: ...


class BatchPlan(Protocol):
    """What decides a run's data: a pure function of the step."""

    def steps_per_epoch(self) -> int:
        """Optimizer steps in one pass over the data, rounded up."""
        ...

    def step(self, step: int) -> Sequence[MicroBatch]:
        """The micro-batches of optimizer step `step` (from 0), whatever the world size."""
        ...


@dataclass(frozen=True)
class PlanSettings:
    """What a plan of training batches is made from."""

    global_batch_size: int
    micro_rows: int
    """Rows of one micro-batch over all ranks."""
    devices: int
    """Rows are split over these: every micro-batch's rows are a multiple of it."""
    seed: int


@dataclass(frozen=True)
class Datasets:
    """The data of a run. `valid` is None where there is nothing to validate on."""

    train: SampleSource
    valid: SampleSource | None
    artifacts: Mapping[str, bytes] = field(default_factory=dict)
    """Small files that a run must keep to be used elsewhere (normalisation, tokenizer), by name."""
    identity: Mapping[str, Any] = field(default_factory=dict)
    """Plain values that identify the data (a digest of its content): a resumed run must have the
    same."""


@dataclass(frozen=True)
class TrainingDefaults:
    """A task's own defaults where the user and the preset say nothing."""

    global_batch_size: int = 64
    rows_per_device: int = 16
    """Largest micro-batch of a device where the accumulation steps are chosen automatically."""
    epochs: int | None = 10
    max_steps: int | None = None
    lr: float = 1e-3
    schedule: str = "constant"
    warmup_steps: int = 0
    final_lr_fraction: float = 1.0
    clip_norm: float | None = 1.0
    ema_decay: float | None = None
    ema_every: int = 1
    weight_decay: float = 0.0
    adam: AdamSettings = field(default_factory=AdamSettings)


@dataclass(frozen=True)
class Preset:
    """What a preset sets for a task, in addition to what it sets for any."""

    train: Mapping[str, Any] = field(default_factory=dict)
    """Fields of TrainConfig."""
    task: Mapping[str, Any] = field(default_factory=dict)
    """The task's own options."""


PROBED_STEPS = 100
"""Steps of a plan that are searched for shapes of batches where a task gives no examples."""

REMOVED_MEMBERS = {
    "artifacts": "return Datasets(train, valid, artifacts) from `datasets`",
    "restore_artifacts": "define `restore(artifacts)`, which returns a task that uses them",
}
"""What a task defined in earlier versions, and what it defines instead."""


class Task(ABC):
    """What is learned. A user's own task subclasses this; `docs/own_task.py` is one.

    A task's constructor takes keyword arguments that `--set name=value` and the `[task]` table of a
    config file fill; it opens no file and builds no model.
    """

    name: str
    source: ClassVar[str | None] = None
    """Where a user's class comes from, `FILE:CLASS`; set where it is loaded."""
    defaults: TrainingDefaults = TrainingDefaults()
    presets: ClassVar[Mapping[str, Preset]] = {}
    """By name: quick, safe, balanced, fast."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        for removed, instead in REMOVED_MEMBERS.items():
            if removed in vars(cls):
                raise TypeError(f"{cls.__name__}.{removed} is no longer called: {instead}")

    # -- what must be given ---------------------------------------------------------------------
    @abstractmethod
    def build_model(self, ops: ModelOps) -> nn.Module:
        """The model on the CPU, freshly initialised from torch's seeded generator."""

    @abstractmethod
    def datasets(self) -> Datasets:
        """Opens the data. Raises `DataError` naming file and field where it cannot."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """`{"loss": ..., ...}` of one batch, each value of shape (rows,) or 0-d.

        (rows,): each row's own loss; masked rows (`batch["mask"]` 0) are left out by the engine.
        0-d: a mean over the batch. `"weight"`, of the same shape as the loss, says how much each
        counts (default 1 a row): the step minimises sum(weight loss) / sum(weight) over all its
        micro-batches and devices. Other entries are logged, weighted alike.
        """

    # -- what has a default ---------------------------------------------------------------------
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

    def draw(self, sample: Sample, rng: np.random.Generator) -> Sample:
        """Adds a sample's own random draws; `rng` is keyed by (seed, epoch, index)."""
        return sample

    def collate(self, samples: Sequence[Sample], micro: MicroBatch) -> Batch:
        """Stacks samples to exactly `micro.rows` rows plus `mask` (rows,), 0 on filled rows."""
        return stack_samples(samples, micro.rows)

    def plan(self, data: SampleSource, settings: PlanSettings) -> BatchPlan:
        """Which samples make up an optimizer step."""
        return ShuffledPlan(len(data), settings)

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

    def example_batches(self, rows: int) -> list[Batch]:
        """Host batches of each shape that training uses, the costliest first.

        By default one sample of the training data repeated, for each shape in the first steps of
        the plan; override it to probe where the data is not at hand.
        """
        from tpukit.train.loader import MicroBatchData

        data = self.datasets().train
        plan = self.plan(data, PlanSettings(rows, rows, 1, seed=0))
        steps = range(min(plan.steps_per_epoch(), PROBED_STEPS))
        shapes = {(m.rows, m.shape): m for step in steps for m in plan.step(step)}
        made = MicroBatchData(self, data, seed=0)
        batches = [made.filled(micro) for micro in shapes.values()]
        return sorted(batches, key=lambda batch: -sum(t.numel() for t in batch.values()))

    def probe_batches(self, settings: PlanSettings) -> list[Batch]:
        """Host batches as `example_batches` makes them, for a run planned with `settings`."""
        return self.example_batches(settings.micro_rows)

    def for_probing(self) -> Self:
        """The task where only shapes matter: it reads no weights and asks no network."""
        return self

    def score(self, model: nn.Module, backend: Backend, data: SampleSource) -> dict[str, float]:
        """Further validation metrics (ROUGE on a few samples); costly ones limit their samples."""
        return {}

    # -- a trained run ----------------------------------------------------------------------------
    def inference_model(self, ops: ModelOps, weights: Mapping[str, Tensor]) -> nn.Module:
        """The model on the CPU with a run's weights, as `evaluate` and `predict` use it."""
        model = self.build_model(ops)
        load_weights(model, weights, "the checkpoint")
        return model

    def read_checkpoint_file(self, path: Path) -> dict[str, Tensor]:
        """Weights from a checkpoint file of other code (`test --checkpoint FILE`)."""
        raise UsageError(
            f"task {self.name!r} reads no checkpoint files.", "Give a run folder with --run DIR."
        )

    def evaluate(
        self,
        model: nn.Module,
        backend: Backend,
        request: EvaluationRequest,
        log: Callable[[str], None],
    ) -> dict[str, Any]:
        """The JSON fields of `tpukit test`.

        `model` is prepared, in eval mode, and holds the run's best (EMA) weights. Every rank calls
        this; only rank 0 writes files. `log` prints a line for people.
        """
        raise UsageError(
            f"task {self.name!r} has no `evaluate`.",
            "Add `def evaluate(self, model, backend, request, log)` to the task class;"
            " docs/own_task.py has one.",
        )

    def check_prediction(self, request: PredictionRequest) -> None:
        """Raises what `predict` would, as far as it is known before a device is opened."""

    def predict(
        self,
        model: nn.Module,
        backend: Backend,
        request: PredictionRequest,
        log: Callable[[str], None],
    ) -> dict[str, Any]:
        """Writes predictions to `request.out`; the JSON fields of `tpukit predict`.

        Called as `evaluate` is.
        """
        raise UsageError(
            f"task {self.name!r} has no `predict`.",
            "Add `def predict(self, model, backend, request, log)` to the task class;"
            " docs/own_task.py has one.",
        )


def stack_samples(samples: Sequence[Sample], rows: int) -> Batch:
    """Samples stacked along a first axis, the last one repeated to fill `rows`, plus `mask`.

    Raises ValueError naming the entry in which two samples differ.
    """
    filled = [dict(sample) for sample in (*samples, *([samples[-1]] * (rows - len(samples))))]
    try:
        # In a DataLoader worker it stacks straight into shared memory.
        batch: Batch = default_collate(filled)
    except (KeyError, RuntimeError, TypeError) as error:
        raise ValueError(why_not_stacked(samples)) from error
    mask = torch.zeros(rows)
    mask[: len(samples)] = 1.0
    return {**batch, "mask": mask}


class ShuffledPlan:
    """Passes over shuffled data laid end to end and cut into equal steps: nothing is dropped.

    The order of pass `e` is a permutation keyed by (seed, e), so any step is found directly.
    """

    def __init__(self, samples: int, settings: PlanSettings) -> None:
        self.samples = samples
        self.settings = settings
        self._orders: dict[int, np.ndarray[Any, np.dtype[np.int64]]] = {}

    def steps_per_epoch(self) -> int:
        return -(-self.samples // self.settings.global_batch_size)

    def step(self, step: int) -> list[MicroBatch]:
        size, rows = self.settings.global_batch_size, self.settings.micro_rows
        keys = [self._key(step * size + i) for i in range(size)]
        return [MicroBatch(tuple(keys[i : i + rows]), rows) for i in range(0, size, rows)]

    def _key(self, position: int) -> SampleKey:
        epoch, offset = divmod(position, self.samples)
        return SampleKey(epoch, int(self._order(epoch)[offset]))

    def _order(self, epoch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        if epoch not in self._orders:
            self._orders = {e: o for e, o in self._orders.items() if e == epoch - 1}
            self._orders[epoch] = sample_rng(self.settings.seed, epoch, -1).permutation(
                self.samples
            )
        return self._orders[epoch]


def sample_rng(seed: int, epoch: int, index: int) -> np.random.Generator:
    """The generator of one sample's draws in one pass; index -1 is the pass' own."""
    return np.random.Generator(np.random.Philox(key=[seed, (epoch << 32) | (index & 0xFFFFFFFF)]))
