"""From a plan to host batches: a DataLoader whose items are whole micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from tpukit.errors import DataError, TpukitError
from tpukit.hardware.backend import Batch
from tpukit.train.mistakes.raised import task_failure
from tpukit.train.mistakes.returned import check_batch, check_sample, place_of_samples
from tpukit.train.task import (
    VALIDATION_EPOCH,
    BatchPlan,
    MicroBatch,
    Sample,
    SampleKey,
    SampleSource,
    Task,
    sample_rng,
)

# A rank whose share holds no sample still computes, on one that is masked.
FILLER = SampleKey(VALIDATION_EPOCH, 0)


class MicroBatchData(Dataset[Batch | TpukitError]):
    """Builds the batch of a MicroBatch; runs in a DataLoader worker."""

    def __init__(self, task: Task, data: SampleSource, seed: int) -> None:
        self.task = task
        self.data = data
        self.seed = seed
        self._stacks = type(task).collate is Task.collate

    def __getitem__(self, micro: MicroBatch) -> Batch | TpukitError:
        try:
            return self._batch(micro)
        except Exception as error:
            failure = error if isinstance(error, TpukitError) else task_failure(error)
            if get_worker_info() is None or failure is None:
                raise
            # As a value: torch would send its traceback's text alone.
            return failure

    def _batch(self, micro: MicroBatch) -> Batch:
        samples = [self._sample(key) for key in micro.keys or (FILLER,)]
        try:
            collated = self.task.collate(samples, micro)
        except ValueError as error:
            if not self._stacks:
                raise
            raise DataError(
                f"{place_of_samples(self.data, self.task.datasets)}: {error}.",
                "Pad them to a few fixed shapes in the data set, or in the task's own `collate`.",
            ) from error
        batch = check_batch(collated, self.task.collate, micro.rows)
        if not micro.keys:
            batch["mask"].zero_()
        return batch

    def filled(self, micro: MicroBatch) -> Batch:
        """A batch of this shape from its first sample alone, as `collate` fills up rows."""
        batch = self._batch(replace(micro, keys=micro.keys[:1]))
        batch["mask"].fill_(1.0)
        return batch

    def _sample(self, key: SampleKey) -> Sample:
        sample = self.data[key.sample]
        if self._stacks:
            check_sample(sample, key.sample, self.data, self.task.datasets)
        return self.task.draw(sample, sample_rng(self.seed, key.epoch, key.sample))


class MicroBatchLoader(DataLoader[Batch | TpukitError]):
    """Raises a DataLoader worker's error here as it was raised there."""

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        # Not a generator: the workers are started now, by this thread.
        return map(_require_batch, super().__iter__())


def _require_batch(loaded: Batch | TpukitError) -> Batch:
    if isinstance(loaded, TpukitError):
        raise loaded
    return loaded


class PlannedMicroBatches(Sampler[MicroBatch]):
    """This rank's share of the micro-batches of steps `start` to `stop` of a plan."""

    def __init__(self, plan: BatchPlan, start: int, stop: int, rank: int, world_size: int) -> None:
        self.plan = plan
        self.start = start
        self.stop = stop
        self.rank = rank
        self.world_size = world_size

    def __iter__(self) -> Iterator[MicroBatch]:
        for step in range(self.start, self.stop):
            for micro in self.plan.step(step):
                yield micro.share(self.rank, self.world_size)


@dataclass(frozen=True)
class LoaderSettings:
    """How batches are made on the host."""

    workers: int
    seed: int
    start_worker: Callable[[int], None] | None = None
    """Called in each DataLoader worker as it starts."""


def make_loader(
    task: Task, data: SampleSource, micro_batches: Any, settings: LoaderSettings
) -> MicroBatchLoader:
    """A DataLoader over micro-batches (any iterable of them), in their order."""
    return MicroBatchLoader(
        MicroBatchData(task, data, settings.seed),
        sampler=micro_batches,
        batch_size=None,
        num_workers=settings.workers,
        prefetch_factor=2 if settings.workers else None,
        worker_init_fn=settings.start_worker if settings.workers else None,
        # One of its own: a loader would otherwise draw from the generator that dropout uses.
        generator=torch.Generator().manual_seed(settings.seed),
    )
