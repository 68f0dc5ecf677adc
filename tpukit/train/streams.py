"""Training data without a length: passes laid end to end, cut into steps, split over the ranks.

A stream that datasets, WebDataset or the task can split is read by each rank for its own part;
every rank reads all of another one and keeps its rows.
"""

from __future__ import annotations

import codecs
import copy
import hashlib
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch

from tpukit.errors import ConfigError, DataError
from tpukit.train.data import (
    MicroBatch,
    NamedStream,
    PlanSettings,
    Sample,
    SampleKey,
    global_draws,
)
from tpukit.train.module_state import saved


class StreamPosition(NamedTuple):
    """A position in a stream."""

    epoch: int
    """Which pass over the stream."""
    sample: int
    """Samples read in this pass."""
    state: Any
    """The stream's own `state_dict()`; None: it is read from the start of the pass."""
    step: int | None = None
    """Optimizer steps done there; None: those of the checkpoint."""


class StreamPlan:
    """The batches of a stream: its passes concatenated and cut into equal steps.

    Of a stream that is not split every rank reads all samples and keeps its rows of each
    micro-batch, so a run does not depend on the world size. `set_epoch(epoch)`, where the stream
    has it, is called before each pass.
    """

    def __init__(self, data: Iterable[Sample], settings: PlanSettings) -> None:
        self.data = self._whole = data
        self.settings = settings
        self.rank, self.world_size = 0, 1
        self.is_split = False
        """Whether `data` is this rank's part."""
        self._micro_batches: list[MicroBatch] = []
        self._start(StreamPosition(0, 0, None, 0))

    def split(self, part: Iterable[Sample], rank: int, world_size: int) -> None:
        """Reads a rank's part alone from now on."""
        self.data, self.rank, self.world_size, self.is_split = part, rank, world_size, True
        self._start(StreamPosition(0, 0, None, 0))

    def steps_per_epoch(self) -> int:
        raise DataError(
            "the training data is a stream, whose length is not known: epochs cannot be counted.",
            "Give --max-steps N instead (or TrainingDefaults(max_steps=N)).",
            id="stream-length",
        )

    def step(self, step: int) -> list[MicroBatch]:
        """The micro-batches of a step with their samples; reads on to it."""
        if step < self._step:
            raise ValueError(f"a stream is read forwards: step {step} comes before {self._step}")
        while self._step < step:
            self._micro_batches = self._read_step()
            self._step += 1
        return self._micro_batches

    def require_alike(self, gather: Callable[[str], list[str]]) -> None:
        """Raises DataError where ranks that read the whole stream find other samples in it.

        gather: gives what every rank has given it; each calls this.
        """
        digest = hashlib.sha256()
        samples = self.step(0)[0].samples or ()
        for value in (v for s in samples if isinstance(s, Mapping) for v in s.values()):
            with suppress(TypeError, ValueError, RuntimeError):  # what no array holds
                array = np.asarray(value)
                digest.update(b"" if array.dtype == object else array.tobytes())
        if len({*gather(digest.hexdigest())}) > 1:
            raise DataError(
                f"the training stream {type(self.data).__name__} yields other samples in each rank,"
                " which reads all of them and keeps its rows: the others are never trained on.",
                "Yield the same in every rank (no split by rank, a seeded shuffle), or return a"
                " rank's part from the task's `shard(stream, rank, world_size)`.",
                id="stream-ranks",
            )

    def share(self, micro: MicroBatch, rank: int, world_size: int) -> MicroBatch:
        """A rank's rows of a micro-batch; of a part all are."""
        return micro if self.is_split else micro.share(rank, world_size)

    @property
    def keeps_positions(self) -> bool:
        """Whether the stream goes on where it stood, by StatefulDataLoader's protocol."""
        return hasattr(self.data, "state_dict") and hasattr(self.data, "load_state_dict")

    def position(self) -> bytes | None:
        """The position after the step that was read last; None where the stream keeps none.

        It may copy a whole shuffle buffer: for saves alone.
        """
        if not self.keeps_positions:
            return None
        # Now, as the stream's state may be what it goes on with.
        state = self.data.state_dict()  # type: ignore[attr-defined]
        return pack_position(self._position._replace(state=state, step=self._step + 1))

    def seek(self, steps_done: int, packed: bytes | None) -> int:
        """Goes to the packed position, or the start; returns the steps that were done there. The
        next `step` reads on to where the stream was after `steps_done`.

        Raises ConfigError for the parts of another number of ranks.
        """
        found = None if packed is None else unpack_position(packed)
        if isinstance(found, list):
            if len(found) != self.world_size or not self.is_split:
                raise ConfigError(
                    f"the training stream was split over {len(found)} ranks: this run would read"
                    " other parts.",
                    f"Resume with {len(found)} ranks, or begin a new run with --init-from.",
                    id="stream-ranks",
                )
            found = found[self.rank]
        elif self.is_split:  # a run that began with one rank goes on reading all samples in each
            self.data, self.rank, self.world_size, self.is_split = self._whole, 0, 1, False
            found = found or StreamPosition(0, 0, None, 0)
        if found is None:
            return 0  # what was read to check the plan need not be read again
        self._start(found if found.step is not None else found._replace(step=steps_done))
        return self._step + 1

    def _start(self, position: StreamPosition) -> None:
        self._position, self._step = position, (position.step or 0) - 1
        self._samples = self._read(position.state)
        self._micro_batches = []

    def _read_step(self) -> list[MicroBatch]:
        counts = range(0, self.settings.global_batch_size, self.settings.micro_rows)
        rows = self.settings.micro_rows // self.world_size
        # A stream that shuffles by them is the same in every rank, and when it is read again.
        with global_draws(self.settings.seed, self._step + 1):
            parts = [[next(self._samples) for _ in range(rows)] for _ in counts]
        return [
            MicroBatch(tuple(k for k, _ in part), rows, samples=tuple(s for _, s in part))
            for part in parts
        ]

    def _read(self, state: Any = None) -> Iterator[tuple[SampleKey, Sample]]:
        """Samples with their keys, pass after pass; `state` is where the first one goes on."""
        while True:
            epoch = self._position.epoch
            if hasattr(self.data, "set_epoch"):
                self.data.set_epoch(epoch)
            if state is not None:
                self.data.load_state_dict(state)  # type: ignore[attr-defined]
                state = None
            for sample in self.data:
                place = self._position.sample
                self._position = StreamPosition(epoch, place + 1, None)
                yield SampleKey(epoch, place * self.world_size + self.rank), sample
            self._require_another_pass()
            self._position = StreamPosition(epoch + 1, 0, None)

    def _require_another_pass(self) -> None:
        epoch, count, *_ = self._position
        if count == 0:
            raise DataError(
                f"the training stream {type(self.data).__name__} yields no sample in pass {epoch}"
                + (f" to rank {self.rank} of {self.world_size}." if self.is_split else "."),
                "Give it at least as many shards as there are ranks."
                if self.is_split
                else "Check that its `__iter__` starts from the beginning each time.",
            )
        if iter(self.data) is self.data:
            raise DataError(
                f"the training stream {type(self.data).__name__} ended after {count} samples, in"
                f" step {self._step + 2}, and cannot be read again: it is an iterator.",
                "Give an object whose `__iter__` starts anew, or lower --max-steps.",
            )


# -- parts of the ranks --------------------------------------------------------------------------
def part_of_rank(data: Any, rank: int, world_size: int) -> Any:
    """A rank's part of a stream of datasets or WebDataset; None for any other.

    A WebDataset splits its shards by itself, unless its pipeline leaves that out.
    """
    if isinstance(data, NamedStream):
        part = part_of_rank(data.data, rank, world_size)
        return part if part is None else NamedStream(part, data.names)
    library = next((c.__module__.partition(".")[0] for c in type(data).__mro__
                    if c.__module__.startswith(("datasets.", "webdataset."))), None)  # fmt: skip
    if library == "datasets":
        from datasets.distributed import split_dataset_by_node

        return split_dataset_by_node(data, rank, world_size)
    stages = getattr(data, "pipeline", None)
    if library != "webdataset" or not isinstance(stages, list):
        return None
    from webdataset.shardlists import single_node_only, split_by_node

    if single_node_only in stages:
        data = copy.copy(data)
        data.pipeline = [split_by_node if s is single_node_only else s for s in stages]
        return data
    splits = any("split" in getattr(s, "__name__", "") or "Resampled" in type(s).__name__
                 for s in stages)  # fmt: skip
    return data if splits else None


# -- positions as bytes --------------------------------------------------------------------------
def pack_position(position: StreamPosition) -> bytes | None:
    """A position as bytes that `unpack_position` reads without running code; None: it cannot."""
    try:
        unpack_position(packed := saved(tuple(position)))
    except Exception:  # whatever a stream's state holds
        return None
    return packed


def pack_positions(packed: Sequence[bytes | None]) -> bytes:
    """Those of all ranks, in their order; a part without one is read again from its start."""
    return saved([tuple(_position_of(each)) for each in packed])


def unpack_position(packed: bytes) -> StreamPosition | list[StreamPosition]:
    """The position that was packed, or those of all ranks."""
    with torch.serialization.safe_globals(_plain_globals()):
        found = torch.load(io.BytesIO(packed), weights_only=True)
    if isinstance(found, list):
        return [StreamPosition(*each) for each in found]
    return StreamPosition(*found)


def _position_of(packed: bytes | None) -> StreamPosition:
    found = StreamPosition(0, 0, None, 0) if packed is None else unpack_position(packed)
    assert isinstance(found, StreamPosition)
    return found


def _plain_globals() -> list[Any]:
    """What pickled bytes, arrays and numbers of NumPy are made with: none of it runs code."""
    made_by = [np.empty(0).__reduce__()[0], np.float32(0).__reduce__()[0], codecs.encode]
    dtypes = [getattr(np.dtypes, name) for name in np.dtypes.__all__]
    return [*made_by, np.ndarray, np.dtype, *dtypes]
