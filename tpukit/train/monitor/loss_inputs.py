"""What the host's batches show of a task's loss: values that no step could read in time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor, nn

from tpukit.errors import DataError
from tpukit.hardware.backend import Backend, Batch
from tpukit.train.mistakes.index_range import IndexTrace, IndexUse
from tpukit.train.mistakes.raised import place_of
from tpukit.train.task import VALIDATION_EPOCH, MicroBatch, Task

IGNORED = -100
"""The label that torch's losses leave out by default."""
BATCHES_KEPT = 8
"""Maximum number of batches that wait for the first pass of their shape."""
PER_ROW = """\
    loss = F.cross_entropy(scores, batch["label"], reduction="none")  # one value a row
    return {"loss": loss}"""
PER_TOKEN = """\
    labels = batch["NAME"].masked_fill(batch["mask"][:, None] == 0, -100)  # for the model
    return {"loss": loss, "weight": (labels != -100).sum()}"""


class LossInputs:
    """Looks at host batches beside what `loss` does with them.

    Batches come from the thread that loads them, the loss from the engine's own.
    """

    def __init__(self, task: Task, backend: Backend, model: nn.Module) -> None:
        self.task = task
        is_compiled = getattr(backend.unwrap(model), "_compiled_call_impl", None) is not None
        # Elsewhere an index out of range is an error of the device's own.
        self.checks_indices = backend.compiles_everything and not is_compiled
        self.is_mean: bool | None = None
        """Whether the loss is a 0-d mean without a weight; None before the first batch."""
        self.has_filled_rows = False
        self._labels: dict[str, set[int]] = {}
        self._warned: set[str] = set()
        self._uses: dict[object, list[IndexUse]] = {}
        self._waiting: deque[tuple[Batch, MicroBatch]] = deque(maxlen=BATCHES_KEPT)
        self._lock = threading.Lock()

    # -- called by the loader ----------------------------------------------------------------------
    def see(self, batch: Batch, micro: MicroBatch) -> None:
        """Looks at a host batch before it is sent. Raises DataError for an index out of range."""
        if self.is_mean is not False:
            self._count(batch)
        if self.checks_indices:
            with self._lock:
                if _shapes(batch) not in self._uses:
                    self._waiting.append((batch, micro))
                    return
            self._check_indices(batch, micro)

    def _count(self, batch: Batch) -> None:
        real = batch["mask"] != 0
        # A mean over no sample at all weighs nothing.
        self.has_filled_rows |= bool(real.any() and not real.all())
        for name, tensor in batch.items():
            counts = self._labels.get(name, set())
            if len(counts) < 2 and tensor.dtype == torch.int64 and (tensor == IGNORED).any():
                self._labels[name] = counts | {int((tensor != IGNORED).sum())}

    def _check_indices(self, batch: Batch, micro: MicroBatch) -> None:
        for use in self._uses[_shapes(batch)]:
            wrong = None
            with suppress(Exception):  # the loss takes another path for this batch
                wrong = use.first_wrong(batch)
            if wrong is not None:
                raise self._out_of_range(use, micro, *wrong)

    def _out_of_range(
        self, use: IndexUse, micro: MicroBatch, name: str, row: int, value: int
    ) -> DataError:
        part = sample = ""
        if micro.counts is None and micro.keys:
            key = micro.keys[row % len(micro.keys)]
            part = "validation " if key.epoch == VALIDATION_EPOCH else "training "
            sample = f" of {part}sample {key.sample}"
        return DataError(
            f"{name!r}{sample} holds {value}: `{use.function}` in {place_of(self.task.loss)} takes"
            f" {use.wanted()}.",
            f"Correct the data, or build the model for more than {use.high} of them.",
            id="index-range",
        )

    # -- called by the engine ----------------------------------------------------------------------
    @contextmanager
    def watching(self, batch: Batch) -> Iterator[None]:
        """Around the loss of a device batch: the first pass of a shape shows what it indexes."""
        shapes = _shapes(batch)
        if not self.checks_indices or shapes in self._uses:
            yield
            return
        with IndexTrace(batch) as trace:
            yield
        with self._lock:
            self._uses[shapes] = trace.uses
            seen = [one for one in self._waiting if _shapes(one[0]) == shapes]
            self._waiting = deque(
                (one for one in self._waiting if _shapes(one[0]) != shapes), BATCHES_KEPT
            )
        for host, micro in seen:
            self._check_indices(host, micro)

    def look_at(self, outputs: dict[str, Tensor]) -> None:
        """Notes what the loss returned."""
        self.is_mean = outputs["loss"].ndim == 0 and "weight" not in outputs

    def warnings(self) -> Iterator[str]:
        """What is wrong about a mean, with its fix; each once."""
        if not self.is_mean:
            return
        uneven = [(n, sorted(c)) for n, c in self._labels.items() if len(c) > 1]
        labels = next(iter(self._labels), None)
        fix = PER_TOKEN.replace("NAME", labels) if labels else PER_ROW
        start = f"Warning: {place_of(self.task.loss)} returns a mean (0-d 'loss')"
        if self.has_filled_rows and "rows" not in self._warned:
            self._warned.add("rows")
            yield f"{start}, and rows that only fill a batch up count in it. Instead:\n{fix}"
        elif uneven and not self._warned:
            self._warned.add("labels")
            name, (few, many) = uneven[0]
            yield (
                f"{start}: batches with {few} and {many} labels in {name!r} count alike."
                f" Say how much each counts:\n{fix}"
            )


def _shapes(batch: Batch) -> object:
    """Shapes of the entries without the rows: each host of a pod has a part of them."""
    return tuple((name, tensor.shape[1:]) for name, tensor in batch.items())
