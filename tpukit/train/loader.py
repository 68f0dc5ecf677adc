"""From a plan to host batches: a DataLoader whose items are whole micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from tpukit.hardware.backend import Batch
from tpukit.train.task import (
    VALIDATION_EPOCH,
    BatchPlan,
    MicroBatch,
    SampleKey,
    SampleSource,
    Task,
    sample_rng,
)

# A rank whose share holds no sample still computes, on one that is masked.
FILLER = SampleKey(VALIDATION_EPOCH, 0)


class MicroBatchData(Dataset[Batch]):
    """Builds the batch of a MicroBatch; runs in a DataLoader worker."""

    def __init__(self, task: Task, data: SampleSource, seed: int) -> None:
        self.task = task
        self.data = data
        self.seed = seed

    def __getitem__(self, micro: MicroBatch) -> Batch:
        samples = [
            self.task.draw(self.data[key.sample], sample_rng(self.seed, key.epoch, key.sample))
            for key in micro.keys or (FILLER,)
        ]
        batch = self.task.collate(samples, micro)
        if not micro.keys:
            batch["mask"].zero_()
        return batch


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
) -> DataLoader[Batch]:
    """A DataLoader over micro-batches (any iterable of them), in their order."""
    return DataLoader(
        MicroBatchData(task, data, settings.seed),
        sampler=micro_batches,
        batch_size=None,
        num_workers=settings.workers,
        prefetch_factor=2 if settings.workers else None,
        worker_init_fn=settings.start_worker if settings.workers else None,
        # One of its own: a loader would otherwise draw from the generator that dropout uses.
        generator=torch.Generator().manual_seed(settings.seed),
    )
