"""Which samples make an optimizer step: plans, micro-batches, keyed draws."""

from __future__ import annotations

import errno
import random
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeGuard

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate

from tpukit.errors import DataError, JobError
from tpukit.hardware.backend import Batch
from tpukit.io.units import format_bytes
from tpukit.train.checks import why_not_stacked

Sample = Mapping[str, Any]
"""A dict of arrays (or numbers) of fixed shapes."""


class SampleKey(NamedTuple):
    """Which sample, and in which pass over the data: together they seed its own draws."""

    epoch: int
    sample: int


VALIDATION_EPOCH = 2**31 - 1
"""The epoch of every validation sample: its draws are the same each time."""
FIRST_SAMPLE = SampleKey(VALIDATION_EPOCH, 0)


@dataclass(frozen=True)
class MicroBatch:
    """The samples of one forward and backward pass, over all ranks until `share` cuts it."""

    keys: tuple[SampleKey, ...]
    rows: int
    """Rows of the batch; those beyond `keys` are filled and masked."""
    shape: Any = None
    """The task's own description of the batch's fixed shape; None where all have the same."""
    samples: Any = None
    """The samples, where they were read from a stream; None: they are found by their keys."""
    counts: tuple[int, ...] | None = None
    """How many samples each row holds, where they are packed; None: one each."""
    filler: SampleKey = FIRST_SAMPLE
    """The sample, masked, of a share that has none of its own."""

    def share(self, rank: int, world_size: int) -> MicroBatch:
        """The part of one rank: an equal number of rows, its keys a contiguous run."""
        rows = -(-self.rows // world_size)
        own = slice(rank * rows, (rank + 1) * rows)
        counts = None if self.counts is None else self.counts[own]
        if self.counts is not None:
            before = sum(self.counts[: own.start])
            own = slice(before, before + sum(self.counts[own]))
        keys, filler = self.keys[own], self.keys[0] if self.keys else self.filler
        # A share without samples fills its rows with one of this shape.
        samples = None if self.samples is None else self.samples[own] or self.samples[:1]
        return MicroBatch(keys, rows, self.shape, samples, counts, filler)

    def without_filled_rows(self, devices: int) -> list[MicroBatch]:
        """The same samples where each device's rows are all samples, or none: in two parts where
        they do not divide."""
        if self.counts is not None:
            return [self]
        rest = len(self.keys) % devices
        even, odd = self.keys[: len(self.keys) - rest], self.keys[len(self.keys) - rest :]
        parts = ((even, len(even)), (odd, devices))
        return [replace(self, keys=keys, rows=rows) for keys, rows in parts if keys]


class SampleSource(Protocol):
    """A map-style dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Sample: ...


class BatchPlan(Protocol):
    """What decides a run's data: a pure function of the step."""

    def steps_per_epoch(self) -> Fraction | int:
        """Optimizer steps in one pass over the data: exactly, or rounded up."""

    def step(self, step: int) -> Sequence[MicroBatch]:
        """The micro-batches of optimizer step `step` (from 0), whatever the world size."""


@dataclass(frozen=True)
class PlanSettings:
    """What a plan of training batches is made from."""

    global_batch_size: int
    micro_rows: int
    """Rows of one micro-batch over all ranks."""
    devices: int
    """Rows are split over these: every micro-batch's rows are a multiple of it."""
    seed: int
    compiles: bool = False
    """Whether training compiles a program for each shape of its batches."""


def stack_samples(samples: Sequence[Sample], rows: int) -> Batch:
    """Samples stacked along a first axis, repeated in turn to fill `rows`, plus `mask`.

    Raises ValueError naming the entry in which two samples differ.
    """
    filled = [dict(samples[row % len(samples)]) for row in range(max(rows, len(samples)))]
    try:
        # In a DataLoader worker it stacks straight into shared memory.
        with lack_of_room_named():
            batch: Batch = default_collate(filled)
    except (KeyError, RuntimeError, TypeError) as error:
        raise ValueError(why_not_stacked(samples)) from error
    return {**batch, "mask": _mask(len(samples), rows)}


def fill_rows(batch: Batch, used: int, rows: int) -> Batch:
    """A batch of `used` rows with these repeated in turn to fill `rows`, plus `mask`.

    Entries with another number of rows stay as they are, and so does a batch with a mask of
    `rows`: `collate` filled it, and an entry with a value a device may have as many as samples.
    """
    if "mask" in batch and batch["mask"].shape == (rows,):
        return batch
    turns = torch.arange(rows) % used
    filled = {
        name: tensor[turns] if used < rows and tensor.shape[:1] == (used,) else tensor
        for name, tensor in batch.items()
    }
    if "mask" not in batch:
        filled["mask"] = _mask(used, rows)
    elif batch["mask"].shape == (used,):
        filled["mask"] = filled["mask"] * _mask(used, rows)
    return filled


def _mask(used: int, rows: int) -> Tensor:
    """(rows,): 1 for the first `used` rows, 0 for those that fill up."""
    return (torch.arange(rows) < used).float()


class ShuffledPlan:
    """Concatenated passes over shuffled data, cut into equal steps: nothing is dropped.

    The order of pass `e` is a permutation keyed by (seed, e), so any step is found directly.
    """

    def __init__(self, samples: int, settings: PlanSettings) -> None:
        self.samples = samples
        self.settings = settings
        self._orders: dict[int, np.ndarray[Any, np.dtype[np.int64]]] = {}

    def steps_per_epoch(self) -> Fraction:
        return Fraction(self.samples, self.settings.global_batch_size)

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
            self._orders[epoch] = self.draw_order(epoch)
        return self._orders[epoch]

    def draw_order(self, epoch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The samples of one pass in their order."""
        return sample_rng(self.settings.seed, epoch, -1).permutation(self.samples)


def sample_rng(seed: int, epoch: int, index: int) -> np.random.Generator:
    """The generator of one sample's draws in one pass; index -1 is the pass' own."""
    return np.random.Generator(np.random.Philox(key=[seed, (epoch << 32) | (index & 0xFFFFFFFF)]))


@contextmanager
def global_draws(*key: int) -> Iterator[None]:
    """Within the context Python's, NumPy's and torch's own generators draw what the key decides;
    after it they go on as before. Other threads must not draw meanwhile."""
    with seeded_generators(*np.random.SeedSequence(key).generate_state(3).tolist()):
        yield


@contextmanager
def seeded_generators(python: int, numpy: int, of_torch: int) -> Iterator[None]:
    """Seeds Python's, NumPy's and torch's own generators, and puts them back."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(python)
    np.random.seed(numpy)
    torch.default_generator.manual_seed(of_torch)  # not the devices'
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


# -- streams -------------------------------------------------------------------------------------
def is_stream(data: Any) -> TypeGuard[Iterable[Sample]]:
    """Whether samples can be read in order only: an IterableDataset, or what has no length."""
    if isinstance(data, IterableDataset):
        return True
    return hasattr(data, "__iter__") and not hasattr(data, "__len__")


# -- samples that are tuples ---------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class NamedSamples:
    """A map-style data set of tuples as one of dicts."""

    data: Any
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.named_values(self.data[index], f"sample {index}")

    def named_values(self, values: Any, place: str) -> dict[str, Any]:
        """One sample. Raises DataError where there are more or fewer values than names."""
        if not isinstance(values, tuple | list) or len(values) != len(self.names):
            found = len(values) if isinstance(values, tuple | list) else type(values).__name__
            raise DataError(
                f"{place} of {type(self.data).__name__}: expected a tuple of {len(self.names)}"
                f" values ({', '.join(self.names)}), found {found}.",
                "Give `named` one name for each value of a sample.",
            )
        return dict(zip(self.names, values, strict=True))


class NamedStream(IterableDataset[dict[str, Any]]):
    """A stream of tuples as one of dicts; its state is the stream's."""

    def __init__(self, data: Any, names: tuple[str, ...]) -> None:
        self.data = data
        self.names = names
        for member in ("state_dict", "load_state_dict", "set_epoch"):
            if hasattr(data, member):
                setattr(self, member, getattr(data, member))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        samples = NamedSamples(self.data, self.names)
        for index, values in enumerate(self.data):
            yield samples.named_values(values, f"sample {index}")


def named(data: Any, *names: str) -> Any:
    """A data set of tuples with each value under a name: `named(CIFAR10(...), "image", "label")`.

    Works for map-style data sets and for streams.
    """
    return NamedStream(data, names) if is_stream(data) else NamedSamples(data, names)


# -- shared memory of the DataLoader workers -----------------------------------------------------
FOLDER = Path("/dev/shm")
LITTLE_BYTES = 16 * 2**20
"""Free shared memory in which a batch may not find room."""
WORDS = ("unable to allocate shared memory", "unable to write to file </torch_")
"""How torch says that there is no room."""


def put_in_shared_memory(tensors: Iterable[Any]) -> None:
    """Moves a batch there in the worker itself, where the lack of room can be raised.

    Otherwise a thread would do it later, drop the batch, and leave the main process waiting.

    Raises JobError where there is no room.
    """
    with lack_of_room_named():
        for tensor in tensors:
            tensor.share_memory_()


@contextmanager
def lack_of_room_named() -> Iterator[None]:
    """Turns what torch raises without room, or after its time limit, into a JobError."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        # Semaphores and queues lie there too; an error about a disk names its file.
        number, file = getattr(error, "errno", None), getattr(error, "filename", None)
        is_full = number == errno.ENOSPC and file is None
        if is_full or any(words in str(error) for words in WORDS):
            raise _full() from error
        if "DataLoader timed out" in str(error):
            raise (_full() if _has_little_room() else _too_slow(str(error))) from error
        raise


def _has_little_room() -> bool:
    with suppress(OSError):
        return shutil.disk_usage(FOLDER).free < LITTLE_BYTES
    return False


def _full() -> JobError:
    size = ""
    with suppress(OSError):
        usage = shutil.disk_usage(FOLDER)
        size = f" ({format_bytes(usage.free)} of {format_bytes(usage.total)} free)"
    return JobError(
        f"the shared memory of the DataLoader workers is full: {FOLDER}{size}.",
        "Use fewer --num-workers (0 needs none), remove what fills it, or enlarge it (`docker run"
        " --shm-size=8g`); the same command resumes from the last checkpoint.",
        id="shared-memory",
    )


def _too_slow(text: str) -> JobError:
    return JobError(
        f"no batch from the DataLoader workers: {text}.",
        "A worker hangs, or its data are that slow: try --num-workers 0, or wait longer with --set"
        " loader_timeout=3600.",
        id="loader-timeout",
    )
