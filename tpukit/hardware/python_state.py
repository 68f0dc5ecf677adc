"""What a step reads outside of its device: attributes, counters, random generators.

A program repeats the operations of a step, not its Python: where this changes, so may they.
"""

import operator
import pickle
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Iterator
from pathlib import Path
from types import GeneratorType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

PACKAGE = Path(__file__).parents[1]
NOT_USERS = (
    "/site-packages/", "/lib/python3",
    *(f"{PACKAGE}/{part}/" for part in ("hardware", "probe", "train")),
)  # fmt: skip
"""Parts of the paths of code that is not the user's."""
MOST_ENTRIES = 1000
"""Maximum length of a list or dict of settings; longer ones are data."""
MOST_BYTES = 1 << 13
"""Maximum size of an array of settings."""
PLAIN = (bool, type(None), int, float, str, bytes, complex, np.generic)
GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
Entries = dict[Any, Any]
Container = Entries | list[Any]


class PythonState:
    """What the owner of a step holds in `task`, `model` and `optimizer`, and the globals of the
    task's module.

    Lists, dicts and objects of the user's classes are looked into; data sets are not.

    saved: a model; what its state dict holds, and what a step computes with gradients, is left out.
    """

    def __init__(self, owner: Any, saved: nn.Module | None = None) -> None:
        self._saved: set[int] | None = None if saved is None else _tensors(saved)
        self._hidden = {} if saved is None else _saved_entries(saved)
        self._held: dict[int, tuple[str, Container, Entries, Entries]] = {}
        """By id: a container's name, itself, what it holds, and marks of that."""
        module = type(getattr(owner, "task", None)).__module__
        todo = [(module, getattr(sys.modules.get(module), "__dict__", None))]
        todo += [(name, getattr(owner, name, None)) for name in ("optimizer", "model", "task")]
        while todo:  # the task first
            name, value = todo.pop()
            container = _container(value)
            if container is None or len(container) > MOST_ENTRIES or id(container) in self._held:
                continue
            if isinstance(container, OrderedDict) and not container:
                continue  # a module has ten, for hooks; its own marks count them
            name = name if container is value else type(value).__name__
            entries = self._entries(container)
            self._held[id(container)] = name, container, entries, self._marks(entries)
            todo += [(_entry(name, key), inner) for key, inner in entries.items()]

    def change(self, *, within: bool = False) -> str | None:
        """The first attribute that is another now, as `Class.attribute`.

        within: since the step began; else lists may have grown, as a log of steps does.
        """
        return next(self.changes(within=within), None)

    def changes(self, *, within: bool = False) -> Iterator[str]:
        """All of them."""
        for name, container, _, before in self._held.values():
            now = self._marks(self._entries(container))
            if now != before:
                may_grow = isinstance(container, list) and not within
                for key in before if may_grow else {**before, **now}:
                    # In a list NaN is equal to itself.
                    if [now.get(key)] != [before.get(key)]:
                        yield _entry(name, key)

    def _entries(self, container: Container) -> Entries:
        hidden = self._hidden.get(id(container), ())
        return {key: v for key, v in _entries(container).items() if key not in hidden}

    def _marks(self, entries: Entries) -> Entries:
        return {key: self._mark(value) for key, value in entries.items()}

    def _mark(self, value: Any) -> Any:
        if self._saved is not None and isinstance(value, Tensor):
            if id(value) in self._saved or value.grad_fn is not None:
                return None
            # A program writes those of a TPU without counting.
            counts = value.device.type != "tpu" and not value.is_inference()
            return id(value), value._version if counts else 0
        return _mark(value)

    def restore(self) -> None:
        """Leaves attributes and entries as they were."""
        for _, container, entries, _ in self._held.values():
            if isinstance(container, list):
                container[:] = entries.values()
            else:
                for key in container.keys() - entries.keys():
                    del container[key]
                container.update(entries)


def _container(value: Any) -> Container | None:
    """What holds the attributes or entries of a value."""
    if isinstance(value, dict | list):
        return value
    known = isinstance(value, nn.Module | torch.optim.Optimizer | SimpleNamespace)
    return getattr(value, "__dict__", None) if known or _is_of_users_class(value) else None


def _is_of_users_class(value: Any) -> bool:
    """Whether it is an object of the user's code, but no data set."""
    kind = type(value)
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    is_users = kind.__module__ != "builtins" and not any(part in file for part in NOT_USERS)
    return is_users and not hasattr(kind, "__getitem__")


def _entry(name: str, key: Any) -> str:
    """The name of an entry. Tensors, an optimizer's keys, would be computed to be written out."""
    return f"{name}.{key if isinstance(key, str | int) else type(key).__name__}"


def _entries(container: Container) -> Entries:
    return dict(container if isinstance(container, dict) else enumerate(container))


def _tensors(model: nn.Module) -> set[int]:
    passing = {
        id(module._buffers[name])
        for module in model.modules()
        for name in module._non_persistent_buffers_set
    }
    return {id(tensor) for tensor in (*model.parameters(), *model.buffers())} - passing


def _saved_entries(model: nn.Module) -> dict[int, set[str]]:
    """By id of a dict of a module the names in it that its state dict stands for."""
    hidden = {}
    for module in model.modules():
        hidden[id(module._parameters)] = set(module._parameters)
        hidden[id(module._buffers)] = set(module._buffers) - module._non_persistent_buffers_set
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            hidden[id(vars(module))] = set(vars(module)) - {"_modules", "_buffers", "_parameters"}
    return hidden


def _mark(value: Any) -> Any:
    """A plain value; of another object which one it is, and what is changed in place."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, OrderedDict | Iterator):
        return id(value), _position(value) if isinstance(value, Iterator) else len(value)
    if isinstance(value, Tensor):
        counts = value.device.type == "cpu" and not value.is_inference()
        return id(value), value.requires_grad, value._version if counts else 0
    if isinstance(value, tuple) or (isinstance(value, deque | set) and len(value) <= MOST_ENTRIES):
        return tuple(map(_mark, value))
    array = value.get_state().numpy() if isinstance(value, torch.Generator) else value
    if isinstance(array, np.ndarray) and array.nbytes <= MOST_BYTES and not array.dtype.hasobject:
        return array.tobytes()
    return pickle.dumps(value) if type(value) in GENERATORS else id(value)


def _position(value: Iterator[Any]) -> Any:
    """How far an iterator is: a generator by its variables, others by how many values are left."""
    if isinstance(value, GeneratorType):
        inner = value.gi_frame.f_locals if value.gi_frame else {}
        return [(name, _mark(held)) for name, held in inner.items() if held is not value]
    if type(value).__module__ not in ("builtins", "itertools"):
        return None
    text = repr(value) if type(value).__name__ == "count" else ""
    return operator.length_hint(value, -1), text
