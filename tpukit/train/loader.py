"""From a plan to host batches: a DataLoader whose items are whole micro-batches."""

from __future__ import annotations

import itertools
import math
import pickle
import random
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from tpukit.errors import DataError, TpukitError
from tpukit.hardware.backend import Backend, Batch
from tpukit.train.checks import (
    check_entries,
    check_examples,
    check_rows,
    check_sample,
    place_of_samples,
    task_mistake,
)
from tpukit.train.data import (
    fill_rows,
    global_draws,
    is_stream,
    lack_of_room_named,
    put_in_shared_memory,
)
from tpukit.train.streams import StreamPlan, StreamPosition, pack_position, pack_positions
from tpukit.train.task import (
    BatchPlan,
    MicroBatch,
    PlanSettings,
    Sample,
    SampleKey,
    Task,
    overrides,
    sample_rng,
)
from tpukit.train.user_code import place_of, task_failure

PROBED_STEPS = 100
"""Maximum number of a plan's steps that are searched for shapes of batches."""
SEEN_SAMPLES, FEWEST_SEEN, SEEN_SECONDS = 4096, 32, 2.0
"""Maximum and minimum number of samples whose sizes are compared where a task's `collate` may make
batches of any size, and the seconds after which no more than the minimum are."""
FEW_WORKERS = 4
SeeBatch = Callable[[Batch, MicroBatch], None]


class MicroBatchData(Dataset[Batch | TpukitError]):
    """Builds the batch of a MicroBatch; runs in a DataLoader worker."""

    def __init__(self, task: Task, data: Any, seed: int) -> None:
        self.task = task
        self.data = data
        self.seed = seed
        self._stacks = not overrides(task, "collate")

    def __getitem__(self, micro: MicroBatch) -> Batch | TpukitError:
        first = (micro.keys or (micro.filler,))[0]
        is_worker = get_worker_info() is not None
        try:
            with global_draws(self.seed, first.epoch, first.sample):
                batch = self.batch(micro)
            if is_worker:
                put_in_shared_memory(batch.values())
            return batch
        except Exception as error:
            failure = error if isinstance(error, TpukitError) else task_failure(error)
            if not is_worker or failure is None:
                raise
            # As a value: torch would send its traceback's text alone.
            return failure

    def batch(self, micro: MicroBatch) -> Batch:
        """The host batch of a micro-batch, filled up and with its mask."""
        # A rank whose share holds no sample still computes, on one that is masked.
        keys = micro.keys or (micro.filler,)
        found = unpacked(micro.samples) or (self.data[key.sample] for key in keys)
        samples = [self._drawn(key, sample) for key, sample in zip(keys, found, strict=True)]
        try:
            collated = self.task.collate(samples, micro)
        except ValueError as error:
            if not self._stacks:
                raise
            raise DataError(
                f"{self._place_of_samples()}: {error}.",
                "Pad them to a few fixed shapes in the data set, or in the task's own `collate`.",
            ) from error
        entries = check_entries(collated, self.task.collate)
        used = len(samples if micro.counts is None else micro.counts) or 1
        batch = fill_rows(entries, used, micro.rows)
        check_rows(batch, self.task.collate, micro.rows)
        if not micro.keys:
            batch["mask"].zero_()
        return batch

    def filled(self, micros: Sequence[MicroBatch]) -> list[Batch]:
        """A full batch in the shape of these, of their first sample alone; where `collate` makes
        batches of any size, the largest one with the larger ones of a few, and their smallest."""
        micro = micros[0]
        orders = [[next(self._alone(micros))]]
        if not self._stacks and micro.shape is None and micro.counts is None:
            sizes = self._sizes(micros)
            # All of the largest at once would be a batch that no run meets.
            ones = [one for _, one in sorted(sizes[:FEWEST_SEEN], key=itemgetter(0))]
            _, largest = max(sizes, key=itemgetter(0))
            if len({size for size, _ in sizes}) > 1:
                orders = [[largest, *(one for one in ones[::-1] if one is not largest)], ones]
        batches = []
        for order in orders:
            rows = micro.rows if len(orders) > 1 else 1
            chosen = [*itertools.islice(itertools.cycle(order), rows)]
            keys = tuple(one.keys[0] for one in chosen)
            samples = None if order[0].samples is None else [one.samples[0] for one in chosen]
            batches.append(self.batch(replace(micro, keys=keys, samples=samples)))
            batches[-1]["mask"].fill_(1.0)
        return batches

    def _sizes(self, micros: Sequence[MicroBatch]) -> list[tuple[int, MicroBatch]]:
        """Sizes of micro-batches of one sample each: of a data set's samples, at most
        `SEEN_SAMPLES` from anywhere, in `SEEN_SECONDS`; of a stream's, those of `micros`."""
        ones = self._alone(micros)
        if micros[0].samples is None:
            whole = range(len(self.data))
            places = random.Random(0).sample(whole, min(len(whole), SEEN_SAMPLES))
            ones = (replace(micros[0], keys=(SampleKey(0, place),)) for place in places)
        sizes, start = [], time.monotonic()
        for one in ones:
            sizes.append((_numbers(self.batch(replace(one, rows=1))), one))
            if len(sizes) >= FEWEST_SEEN and time.monotonic() > start + SEEN_SECONDS:
                break
        self.task.seen_samples = len(sizes)
        return sizes

    def _alone(self, micros: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        """Micro-batches of each of their samples."""
        for micro in micros:
            for place, key in enumerate(micro.keys):
                samples = micro.samples and micro.samples[place : place + 1]
                yield replace(micro, keys=(key,), samples=samples)

    def sample(self, key: SampleKey) -> Sample:
        """A sample of a map-style data set, with its draws."""
        return self._drawn(key, self.data[key.sample])

    def _drawn(self, key: SampleKey, sample: Sample) -> Sample:
        drawn = self.task.draw(sample, sample_rng(self.seed, key.epoch, key.sample))
        if drawn is None:
            raise task_mistake(self.task.draw, "returned None", "Return the sample.")
        if self._stacks:
            # Now: what was read may be bytes, which `draw` decodes.
            check_sample(drawn, key.sample, self._place_of_samples)
        return drawn

    def _place_of_samples(self) -> str:
        """Place of the user's code that makes the samples."""
        if overrides(self.task, "draw"):
            return place_of(self.task.draw)
        return place_of_samples(self.data, self.task.datasets)


def import_before_limit(task: Task) -> None:
    """Has a task (see `for_probing`) import what its model and batches need, in a run as in a
    trial: a limit on memory that is set afterwards does not count it."""
    example_batches(task, PlanSettings(1, 1, 1, 0))


def example_batches(task: Task, settings: PlanSettings, data: Any = None) -> list[Batch]:
    """Host batches of each shape of a run planned with `settings`, the costliest first.

    The task's own examples, checked, or samples of its training data (`data` where it is open)
    repeated.
    """
    if overrides(task, "probe_batches"):
        return check_examples(task.probe_batches(settings), task.probe_batches)
    # A stream that is open must not be read for this.
    if data is None or is_stream(data):
        data = task.datasets().train
    task.known_samples = None if is_stream(data) else len(data)
    rows = settings.micro_rows
    plan = task.plan(data, PlanSettings(rows, rows, 1, seed=0))
    steps = range(1 if is_stream(data) else min(math.ceil(plan.steps_per_epoch()), PROBED_STEPS))
    shapes: dict[Any, list[MicroBatch]] = {}
    for micro in itertools.chain.from_iterable(map(plan.step, steps)):
        shapes.setdefault((micro.rows, micro.shape), []).append(micro)
    made = MicroBatchData(task, data, seed=0)
    batches = itertools.chain.from_iterable(map(made.filled, shapes.values()))
    return sorted(batches, key=_numbers, reverse=True)


def _numbers(batch: Batch) -> int:
    return sum(tensor.numel() for tensor in batch.values())


class MicroBatchLoader(DataLoader[Batch | TpukitError]):
    """Raises a DataLoader worker's error here as it was raised there."""

    see: SeeBatch | None = None
    """Called with each batch, in the process that reads them."""

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        # Not a generator: the workers are started now, by this thread.
        with lack_of_room_named():
            return _read(super().__iter__(), self.sampler, self.see)  # type: ignore[arg-type]

    def _get_iterator(self) -> Any:
        return super()._get_iterator() if self.num_workers == 0 else _FromWorkers(self)  # type: ignore[no-untyped-call]


class _FromWorkers(_MultiProcessingDataLoaderIter):
    """Ignores the error of its end where lack of shared memory kept it from being built."""

    def __del__(self) -> None:
        with suppress(AttributeError):
            super().__del__()  # type: ignore[no-untyped-call]


def _read(
    loader: Iterator[Batch | TpukitError], given: GivenMicroBatches, see: SeeBatch | None
) -> Iterator[Batch]:
    with lack_of_room_named():
        for loaded in loader:
            if isinstance(loaded, TpukitError):
                raise loaded
            micro = given.waiting.popleft()
            if see is not None:
                see(loaded, micro)
            yield loaded


class PlannedMicroBatches(Sampler[MicroBatch]):
    """This rank's share of the micro-batches of some steps of a plan."""

    def __init__(
        self, plan: BatchPlan, steps: range, rank: int, world_size: int,
        saves_after: Callable[[int], bool] = lambda done: False,
    ) -> None:  # fmt: skip
        self.plan = plan
        self.saves_after = saves_after
        self.steps = steps
        self.rank = rank
        self.world_size = world_size
        self.ahead: deque[tuple[int, bytes | None]] = deque()
        """Number of micro-batches of each step that was begun and is not done, and the stream's
        position after it, if a checkpoint is due there; the oldest first."""

    def __iter__(self) -> Iterator[MicroBatch]:
        for step in self.steps:
            micro_batches = self.plan.step(step)
            stream, position = self.plan if isinstance(self.plan, StreamPlan) else None, None
            if stream is not None and self.saves_after(step + 1):
                position = stream.position()
            self.ahead.append((len(micro_batches), position))
            for micro in micro_batches:
                if stream is not None:
                    yield stream.share(micro, self.rank, self.world_size)
                else:
                    yield micro.share(self.rank, self.world_size)


@dataclass
class StepBatches:
    """The device batches of a training, step by step."""

    backend: Backend
    sampler: PlannedMicroBatches
    loader: MicroBatchLoader
    position: bytes | None = None
    """Last known position of this rank's training stream: the steps since then are read again."""

    def read(self) -> Generator[list[Batch], None, None]:
        """The micro-batches of one step after the other."""
        batches = self.backend.batches(self.loader)
        for batch in batches:
            count, _ = self.sampler.ahead[0]
            yield [batch, *itertools.islice(batches, count - 1)]

    def step_done(self) -> None:
        """The step whose batches were read last is done."""
        _, position = self.sampler.ahead.popleft()
        self.position = position or self.position

    def saved_position(self) -> bytes | None:
        """What a checkpoint keeps of the training stream. Every rank calls it."""
        stream = self.sampler.plan
        if not isinstance(stream, StreamPlan):
            return None
        if stream.is_split:
            return pack_positions(self.backend.all_gather_objects(self.position))
        if self.position is None and stream.keeps_positions:
            return pack_position(StreamPosition(0, 0, None, 0))
        return self.position


class GivenMicroBatches(Sampler[MicroBatch]):
    """Micro-batches as DataLoader workers are sent them, whose samples may be of a stream.

    Pickled here: tensors would use file descriptors, and pickling errors in the queue's feeder
    thread are lost.
    """

    def __init__(self, micro_batches: Iterable[MicroBatch], *, packs: bool) -> None:
        self.micro_batches = micro_batches
        self.packs = packs
        self.waiting: deque[MicroBatch] = deque()
        """Those whose batches have not come yet, the oldest first, without their samples."""

    def __iter__(self) -> Iterator[MicroBatch]:
        self.waiting.clear()
        for micro in self.micro_batches:
            self.waiting.append(replace(micro, samples=None))
            packs = self.packs and micro.samples is not None
            yield replace(micro, samples=packed(micro.samples)) if packs else micro


def packed(samples: Any) -> bytes:
    """Samples for another process. Raises DataError where they hold what cannot be sent."""
    try:
        return pickle.dumps(samples)
    except Exception as error:  # whatever a sample's own pickling raises
        raise DataError(
            f"a sample of the training stream cannot be sent to a DataLoader worker: {error}.",
            "Yield numbers, text, bytes and arrays, or use --num-workers 0.",
        ) from error


def unpacked(samples: Any) -> Any:
    """The samples, where they were packed for this process."""
    return pickle.loads(samples) if isinstance(samples, bytes) else samples


@dataclass(frozen=True)
class LoaderSettings:
    """How batches are made on the host."""

    workers: int
    seed: int
    start_worker: Callable[[int], None] | None = None
    """Called in each DataLoader worker as it starts."""
    timeout: float = 600.0
    """Seconds that a batch of the workers is waited for."""
    standing: Mapping[int, MicroBatchLoader] = field(default_factory=dict)
    """By id of a data set a loader whose workers wait for it."""


@contextmanager
def standing_workers(
    task: Task, sets: Collection[Any], settings: LoaderSettings
) -> Iterator[LoaderSettings]:
    """Within the context settings with which the loaders of these data sets start no processes.

    Their workers are started here and share the number of workers: in the middle of a run a fork
    beside the threads that write a checkpoint or talk to other ranks can hang.
    """
    loaders: dict[int, MicroBatchLoader] = {}
    if settings.workers:
        each = replace(settings, workers=-(-settings.workers // max(1, len(sets))))
        loaders = {id(data): make_loader(task, data, [], each, stands=True) for data in sets}
        for loader in loaders.values():
            iter(loader)
    try:
        yield replace(settings, workers=0, standing=loaders)
    finally:
        loaders.clear()


def make_loader(
    task: Task,
    data: Any,
    micro_batches: Iterable[MicroBatch],
    settings: LoaderSettings,
    see: SeeBatch | None = None,
    *,
    stands: bool = False,
) -> MicroBatchLoader:
    """A DataLoader over micro-batches, in their order; `see` is called with each batch.

    stands: its workers wait for further micro-batches.
    """
    if (known := settings.standing.get(id(data))) is not None:
        known.sampler.micro_batches, known.see = micro_batches, see  # type: ignore[attr-defined]
        return known
    # Many workers that make batches ahead would fill the shared memory.
    ahead = 2 if settings.workers <= FEW_WORKERS else 1
    loader = MicroBatchLoader(
        MicroBatchData(task, data, settings.seed),
        sampler=GivenMicroBatches(micro_batches, packs=settings.workers > 0),
        batch_size=None,
        num_workers=settings.workers,
        prefetch_factor=ahead if settings.workers else None,
        timeout=settings.timeout if settings.workers else 0,
        worker_init_fn=settings.start_worker if settings.workers else None,
        persistent_workers=stands,
        # One of its own: a loader would otherwise draw from the generator that dropout uses.
        generator=torch.Generator().manual_seed(settings.seed),
    )
    loader.see = see
    return loader
