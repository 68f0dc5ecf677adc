"""Indices out of range, found on the host: XLA clamps them, and a step would learn from them.

One pass of a task's loss shows which entries of its batch index what (labels of cross entropy,
tokens of an embedding), and how they got there. Host batches are then checked before they are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

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
        if name in IN_PLACE or (name.endswith("_") and not name.endswith("__")):
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

    def _on_host(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return self._made[id(leaf)][1]
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf


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
