"""What host batches show of a task's loss: indices out of range, means over filled rows.

XLA clamps an index out of range, and a step would learn from it. One pass of a task's loss shows
which entries of its batch index what (labels of cross entropy, tokens of an embedding), and how
they got there. Host batches are then checked before they are sent.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from tpukit.errors import DataError
from tpukit.hardware.backend import Backend, Batch
from tpukit.train.task import VALIDATION_EPOCH, MicroBatch, Task
from tpukit.train.user_code import place_of

# -- indices --------------------------------------------------------------------------------------
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
KEEP_VALUES = {
    "view", "reshape", "flatten", "squeeze", "unsqueeze", "transpose", "permute", "expand",
    "contiguous", "clone", "detach", "to", "long", "int", "__getitem__", "pad", "cat", "stack",
    "masked_fill", "where", "eq", "ne", "lt", "le", "gt", "ge", "__eq__", "__ne__", "__lt__",
    "__le__", "__gt__", "__ge__",
}  # fmt: skip
"""Functions of torch that are repeated on the host: they move values, compare and replace them."""
IN_PLACE = {"__setitem__", "__iadd__", "__isub__", "__imul__"}


@dataclass(frozen=True)
class FromBatch:
    """How a value of the loss was made from its batch: an entry, or a function of such values."""

    entry: str | None = None
    function: Callable[..., Any] | None = None
    arguments: tuple[Any, Any] = ((), {})

    def compute(self, batch: Mapping[str, Tensor]) -> Any:
        """The value for another batch, on the host."""
        if self.function is None:
            return batch[str(self.entry)]
        arguments, named = tree_map(
            lambda leaf: leaf.compute(batch) if isinstance(leaf, FromBatch) else leaf,
            self.arguments,
        )
        return self.function(*arguments, **named)

    def entries(self) -> set[str]:
        """The entries of the batch that it is made from."""
        if self.entry is not None:
            return {self.entry}
        made = [leaf for leaf in tree_leaves(self.arguments) if isinstance(leaf, FromBatch)]
        return set().union(*(leaf.entries() for leaf in made))


@dataclass(frozen=True)
class IndexUse:
    """An integer tensor that indexes: `low <= value < high`, or `ignored`."""

    function: str
    value: FromBatch
    low: int
    high: int
    ignored: int | None = None

    def first_wrong(self, batch: Mapping[str, Tensor]) -> tuple[str, int, int] | None:
        """(entry, row, value) of the first index out of range in a host batch."""
        found: Tensor = self.value.compute(batch)
        wrong = (found < self.low) | (found >= self.high)
        if self.ignored is not None:
            wrong &= found != self.ignored
        if not wrong.any():
            return None
        value = int(found[wrong][0])
        for name in sorted(self.value.entries()):
            if batch[name].dtype in INTEGERS and (batch[name] == value).any():
                return name, int((batch[name] == value).nonzero()[0][0]), value
        return None

    def wanted(self) -> str:
        """The range in words."""
        ignored = "" if self.ignored is None else f", or ignore_index {self.ignored}"
        return f"{self.low} to {self.high - 1}{ignored}"


class IndexTrace(TorchFunctionMode):
    """Notes what a batch's entries index while it is active; values are left alone."""

    def __init__(self, batch: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.uses: list[IndexUse] = []
        # With the tensor itself: another one must not get its id.
        self._made = {id(t): (t, FromBatch(name)) for name, t in batch.items()}

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        named = named or {}
        result = function(*arguments, **named)
        with suppress(Exception):  # an unusual call is not followed
            self._note(function, arguments, named, result)
        return result

    def _note(self, function: Any, arguments: Any, named: Any, result: Any) -> None:
        name = getattr(function, "__name__", "")
        tensors = [t for t in tree_leaves((arguments, named)) if isinstance(t, Tensor)]
        known = [id(tensor) in self._made for tensor in tensors]
        if not any(known):
            return
        if name == "__setitem__" and self._is_copy(arguments[0]) and all(known):
            # `labels = tokens.clone(); labels[tokens == pad] = -100`
            own = tree_map(self._on_host, arguments)
            self._made = {i: (t, made) for i, (t, made) in self._made.items() if made.entry}
            self._made[id(arguments[0])] = arguments[0], FromBatch(None, _with_items, (own, {}))
        elif name in IN_PLACE or (name.endswith("_") and not name.endswith("__")):
            if id(arguments[0]) in self._made:
                self._made.clear()  # views of it changed too
        elif name in KEEP_VALUES and all(known) and isinstance(result, Tensor):
            made = FromBatch(None, function, tree_map(self._on_host, (arguments, named)))
            self._made[id(result)] = (result, made)
        if found := _index_of(name, arguments, named):
            index, low, high, ignored = found
            if index.dtype in INTEGERS and id(index) in self._made:
                value = self._made[id(index)][1]
                self.uses.append(IndexUse(name.strip("_"), value, low, high, ignored))

    def _is_copy(self, tensor: Tensor) -> bool:
        _, made = self._made.get(id(tensor), (None, FromBatch()))
        return getattr(made.function, "__name__", "") in ("clone", "_with_items")

    def _on_host(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return self._made[id(leaf)][1]
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf


def _with_items(tensor: Tensor, index: Any, value: Any) -> Tensor:
    changed = tensor.clone()
    changed[index] = value
    return changed


def _index_of(name: str, arguments: Any, named: Any) -> tuple[Tensor, int, int, int | None] | None:
    """The tensor that indexes in a call of torch, its range, and what it may be instead."""
    given = dict(enumerate(arguments))
    if name in ("cross_entropy", "nll_loss"):
        scores, labels = arguments[:2]
        return labels, 0, scores.shape[min(1, scores.ndim - 1)], named.get("ignore_index", -100)
    if name == "embedding":
        return given[0], 0, len(given[1]), None
    if name == "one_hot":
        classes = given.get(1, named.get("num_classes", -1))
        return (given[0], 0, classes, None) if classes > 0 else None
    if name in ("gather", "index_select"):
        dim = given.get(1, named.get("dim"))
        return given.get(2, named.get("index")), 0, given[0].shape[dim], None
    if name == "__getitem__" and isinstance(given[1], Tensor):
        return given[1], -len(given[0]), len(given[0]), None
    return None


# -- batches -------------------------------------------------------------------------------------
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
        self.is_compiled = any(
            getattr(module, "_compiled_call_impl", None) for module in model.modules()
        )
        # Elsewhere an index out of range is an error of the device's own.
        self.checks_indices = backend.compiles_everything and not self.is_compiled
        self.is_mean: bool | None = None
        """Whether the loss returns a 0-d entry, a mean perhaps; None before the first batch."""
        self.means: list[str] = []
        """Those entries, where no 0-d weight says how much they count."""
        self.has_filled_rows = False
        self._made_labels: list[IndexUse] | None = None
        """Labels that the loss makes of its batch; None before the first pass."""
        self._labels: dict[tuple[str, int], set[int]] = {}
        """Numbers of labels that were seen, by entry and size."""
        self._warned: set[str] = set()
        self._uses: dict[object, list[IndexUse]] = {}
        self._waiting: deque[tuple[Batch, MicroBatch]] = deque(maxlen=BATCHES_KEPT)
        self._uncounted: deque[Batch] = deque(maxlen=BATCHES_KEPT)
        self._lock = threading.Lock()

    # -- called by the loader ---------------------------------------------------------------------
    def see(self, batch: Batch, micro: MicroBatch) -> None:
        """Looks at a host batch before it is sent. Raises DataError for an index out of range."""
        if self.is_mean is not False:
            self._count(batch)
            if self._made_labels is None:
                self._uncounted.append(batch)
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
            if tensor.dtype == torch.int64:
                self._count_labels(name, tensor, IGNORED)
        for use in self._made_labels or ():
            with suppress(Exception):  # the loss takes another path for this batch
                labels: Tensor = use.value.compute(batch)
                self._count_labels(min(use.value.entries()), labels, use.ignored or 0)

    def _count_labels(self, name: str, labels: Tensor, ignored: int) -> None:
        counts = self._labels.get((name, len(labels)), set())
        if len(counts) < 2 and bool(torch.eq(labels, ignored).any()):
            self._labels[name, len(labels)] = counts | {int(torch.ne(labels, ignored).sum())}

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

    # -- called by the engine ---------------------------------------------------------------------
    @contextmanager
    def watching(self, batch: Batch) -> Iterator[None]:
        """Around the loss of a device batch: the first pass of a shape shows what it indexes."""
        shapes = _shapes(batch)
        is_first = self._made_labels is None and not self.is_compiled
        if not (is_first or (self.checks_indices and shapes not in self._uses)):
            yield
            return
        with IndexTrace(batch) as trace:
            yield
        if is_first:
            made = (use for use in trace.uses if use.value.function is not None)
            self._made_labels = [use for use in made if use.ignored is not None]
        if not self.checks_indices:
            return
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
        means = [name for name, value in outputs.items() if value.ndim == 0]
        self.is_mean, self.means = bool(means), [] if "weight" in means else means
        while self._uncounted:
            host = self._uncounted.popleft()
            if self.means:
                self._count(host)

    def warnings(self) -> Iterator[str]:
        """What is wrong about a mean, with its fix; each once."""
        if not self.means:
            return
        name = "loss" if "loss" in self.means else self.means[0]
        uneven = [(name, sorted(c)) for (name, _), c in self._labels.items() if len(c) > 1]
        labels, _ = next(iter(self._labels), (None, 0))
        fix = PER_TOKEN.replace("NAME", labels) if labels else PER_ROW
        fix = fix if name == "loss" else "    one value a row, or a mean of those in the mask"
        start = f"Warning: {place_of(self.task.loss)} returns a mean (0-d {name!r})"
        if self.has_filled_rows and "rows" not in self._warned:
            self._warned.add("rows")
            yield f"{start}, and rows that only fill a batch up count in it. Instead:\n{fix}"
        elif uneven and name == "loss" and not self._warned:
            self._warned.add("labels")
            name, (few, many) = uneven[0]
            yield (
                f"{start}: batches with {few} and {many} labels in {name!r} count alike."
                f" Say how much each counts:\n{fix}"
            )


def _shapes(batch: Batch) -> object:
    """Shapes of the entries without the rows: each host of a pod has a part of them."""
    return tuple((name, tensor.shape[1:]) for name, tensor in batch.items())
