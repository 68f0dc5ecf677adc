"""Training data without a length: read in order, by every rank alike."""

from __future__ import annotations

import codecs
import io
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import torch
from torch.utils.data import IterableDataset

from tpukit.errors import DataError
from tpukit.train.data.batch_plan import MicroBatch, PlanSettings, Sample, SampleKey


def is_stream(data: Any) -> TypeGuard[Iterable[Sample]]:
    """Whether samples can be read in order only: an IterableDataset, or what has no length."""
    if isinstance(data, IterableDataset):
        return True
    return hasattr(data, "__iter__") and not hasattr(data, "__len__")


class StreamPosition(NamedTuple):
    """A position in a stream."""

    epoch: int
    """Which pass over the stream."""
    sample: int
    """Samples read in this pass."""
    state: Any
    """The stream's own `state_dict()`."""


class StreamPlan:
    """The batches of a stream: its passes concatenated and cut into equal steps.

    Every rank reads all samples and keeps its rows of each micro-batch, so a run does not depend
    on the world size. `set_epoch(epoch)`, where the stream has it, is called before each pass.
    """

    def __init__(self, data: Iterable[Sample], settings: PlanSettings) -> None:
        self.data = data
        self.settings = settings
        self._samples = self._read()
        self._position = StreamPosition(0, 0, None)
        self._step = -1
        self._micro_batches: list[MicroBatch] = []

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

    def position(self) -> bytes | None:
        """The position after the last step; None where the stream keeps none."""
        if not (hasattr(self.data, "state_dict") and hasattr(self.data, "load_state_dict")):
            return None
        # Now, as the stream's state may be what it goes on with.
        return pack_position(self._position._replace(state=self.data.state_dict()))

    def resume(self, steps_done: int, packed: bytes | None) -> int:
        """Goes to where the stream was after `steps_done`; how many samples had to be read again.

        packed: the position; None where it was not kept: the stream is read from its start.
        """
        if packed is None:
            self.step(steps_done - 1)
            return steps_done * self.settings.global_batch_size
        self._position, self._step = unpack_position(packed), steps_done - 1
        self._samples = self._read(self._position.state)
        return 0

    def _read_step(self) -> list[MicroBatch]:
        rows = self.settings.micro_rows
        counts = range(0, self.settings.global_batch_size, rows)
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
                key = SampleKey(epoch, self._position.sample)
                self._position = StreamPosition(epoch, key.sample + 1, None)
                yield key, sample
            self._require_another_pass()
            self._position = StreamPosition(epoch + 1, 0, None)

    def _require_another_pass(self) -> None:
        epoch, count, _ = self._position
        if count == 0:
            raise DataError(
                f"the training stream {type(self.data).__name__} yields no sample in pass {epoch}.",
                "Check that its `__iter__` starts from the beginning each time.",
            )
        if iter(self.data) is self.data:
            raise DataError(
                f"the training stream {type(self.data).__name__} ended after {count} samples, in"
                f" step {self._step + 2}, and cannot be read again: it is an iterator.",
                "Give an object whose `__iter__` starts anew, or lower --max-steps.",
            )


def pack_position(position: StreamPosition) -> bytes | None:
    """A position as bytes that `unpack_position` reads without running code; None: it cannot."""
    file = io.BytesIO()
    try:
        torch.save(tuple(position), file)
        unpack_position(file.getvalue())
    except Exception:  # whatever a stream's state holds
        return None
    return file.getvalue()


def unpack_position(packed: bytes) -> StreamPosition:
    """The position that was packed."""
    with torch.serialization.safe_globals(_plain_globals()):
        return StreamPosition(*torch.load(io.BytesIO(packed), weights_only=True))


def _plain_globals() -> list[Any]:
    """What pickled bytes, arrays and numbers of NumPy are made with: none of it runs code."""
    made_by = [np.empty(0).__reduce__()[0], np.float32(0).__reduce__()[0], codecs.encode]
    dtypes = [getattr(np.dtypes, name) for name in np.dtypes.__all__]
    return [*made_by, np.ndarray, np.dtype, *dtypes]
