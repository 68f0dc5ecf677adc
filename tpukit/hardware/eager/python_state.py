"""What a step reads outside of its device: attributes, counters, random generators.

A program repeats the operations of a step, not its Python: where this changes, so may they.
"""

import pickle
import random
import sys
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

PACKAGE = Path(__file__).parents[2]
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
    """

    def __init__(self, owner: Any) -> None:
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
            entries = _entries(container)
            self._held[id(container)] = name, container, entries, _marks(entries)
            todo += [(_entry(name, key), inner) for key, inner in entries.items()]

    def change(self, *, within: bool = False) -> str | None:
        """The first attribute that is another now, as `Class.attribute`.

        within: since the step began; else lists may have grown, as a log of steps does.
        """
        for name, container, _, before in self._held.values():
            now = _marks(_entries(container))
            if now != before:
                may_grow = isinstance(container, list) and not within
                for key in before if may_grow else {**before, **now}:
                    # In a list NaN is equal to itself.
                    if [now.get(key)] != [before.get(key)]:
                        return _entry(name, key)
        return None

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


def _marks(entries: Entries) -> Entries:
    return {key: _mark(value) for key, value in entries.items()}


def _mark(value: Any) -> Any:
    """A plain value; of another object which one it is, and what is changed in place."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, OrderedDict):
        return id(value), len(value)
    if isinstance(value, Tensor):
        counts = value.device.type == "cpu" and not value.is_inference()
        return id(value), value.requires_grad, value._version if counts else 0
    if isinstance(value, tuple):
        return tuple(map(_mark, value))
    array = value.get_state().numpy() if isinstance(value, torch.Generator) else value
    if isinstance(array, np.ndarray) and array.nbytes <= MOST_BYTES and not array.dtype.hasobject:
        return array.tobytes()
    return pickle.dumps(value) if type(value) in GENERATORS else id(value)
