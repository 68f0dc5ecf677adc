"""What a step reads outside of its device: attributes, closures, globals, arrays, modes.

A program repeats the operations of a step, not its Python: where this changes, so may they.
"""

import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from functools import cache, partial
from itertools import chain
from multiprocessing.sharedctypes import SynchronizedBase
from operator import attrgetter, is_
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as of_modules

from tpukit.hardware.data_settings import DataSettings
from tpukit.hardware.python_values import (
    GENERATORS,
    MISSING,
    PLAIN,
    entry_name,
    held_in,
    is_buffer,
    is_data_set,
    is_namespace,
    is_of_library,
    is_settings,
    mark,
    of_user,
    same,
    set_state,
)

MOST_ENTRIES = 10_000
"""Maximum length of a list or dict that is looked into; a longer one's values are compared."""
MOST_NESTED = 4
"""Maximum depth of a library's objects within each other: a config in a config."""
CONTAINERS = (dict, list, deque, set)
CODE = {name: name for name in ("__code__", "__defaults__", "__kwdefaults__")}
"""What a function can be given in place of its own."""
WRAPPERS = (MethodType, property, staticmethod, classmethod, partial, type(cache(len)))
WRAPPED = ("__func__", "__self__", "__wrapped__", "fget", "func", "args", "keywords")
"""Attributes in which these hold what they call."""
BESIDE = (
    "__builtins__", "__spec__", "__loader__", "__warningregistry__", "__annotations__",
    "__annotations_cache__", "__annotate_func__",
)  # fmt: skip
"""Entries of modules and classes that Python fills in later."""
ATTENTION: list[Callable[[], bool]] = [
    getattr(torch.backends.cuda, f"{way}_sdp_enabled") for way in ("flash", "mem_efficient", "math")
]
of_tensor = attrgetter(
    "requires_grad", "shape", "dtype", "_backward_hooks", "_post_accumulate_grad_hooks"
)
Entries = dict[Any, Any]
Found = Iterator[tuple[str, Any]]


class Attributes:
    """Attributes of a value that no dict holds, by the name that a change is given."""

    def __init__(self, value: Any, names: Mapping[str, str]) -> None:
        self.value, self.names = value, names


class PythonState:
    """What the owner of a step holds in `task`, `model` and `optimizer`, what their code finds in
    closures, defaults, classes and globals, torch's modes, and the environment.

    Lists, dicts and objects are looked into. Of a data set the settings that it had count, between
    steps: it reads files, and keeps what it has read, on threads of its own.

    hidden: by id of a dict the names in it that are left out. left_out: which tensors are; where
        it is given, writes in place count on any device, else on the host alone.
    """

    def __init__(
        self,
        owner: Any,
        hidden: Mapping[int, set[str]] | None = None,
        left_out: Callable[[Tensor], bool] | None = None,
    ) -> None:
        self._hidden, self._left_out = hidden or {}, left_out
        self._seen: dict[int, Any] = {}
        """By id; what is kept keeps its id."""
        self._held: dict[int, tuple[str, Any, Entries]] = {}
        """By id of a container: its name, itself, what it holds."""
        self._empty: list[tuple[str, Any]] = []
        """Dicts that hold nothing: a module has ten, for hooks."""
        self._tensors: list[tuple[str, Tensor]] = []
        self._counted: list[tuple[str, Tensor]] = []
        """Those whose writes count."""
        self._marked: list[tuple[str, Any]] = []
        """Arrays, which change in place."""
        self._moving: list[tuple[str, Any]] = []
        """Random generators and iterators."""
        self._data_sets: list[Any] = []
        for name in ("task", "model", "optimizer"):
            self._look(name, getattr(owner, name, None))
        self._look("os.environ", getattr(os.environ, "_data", None))
        for name, hooks in vars(of_modules).items():
            if name.startswith("_global_") and isinstance(hooks, dict):
                self._look(f"torch.nn.{name}", hooks)
        for space in (torch, nn.functional, Tensor):
            self._hold(space.__name__, space)
        self._settings = DataSettings(self._data_sets, self._seen)
        self._remember()

    def change(self, *, within: bool = False) -> str | None:
        """The first attribute that is another now, as `Class.attribute`.

        within: since the step began. Then random generators and iterators may not have moved
            either; a step that moved none of them does not depend on where they are.
        """
        if not within and self._is_same():
            return None
        found = next(self.changes(within=within), None)
        if found is None and not within:
            self._remember()  # other objects of the same values
        return found

    def changes(self, *, within: bool = False) -> Iterator[str]:
        """All of them."""
        return (name for name, *_ in self._changed(within))

    def changes_once(self) -> bool:
        """Whether the next steps may leave alone what has changed since the step began: each such
        value was none before (a cache; a number is a counter), or is a switch."""
        return all(
            type(now) is bool
            if type(before) is bool
            else (before is MISSING or before is None) and type(now) not in (int, float)
            for _, before, now in self._changed(within=True)
        )

    def _changed(self, within: bool) -> Iterator[tuple[str, Any, Any]]:
        """What is another now, with what it was and is."""
        yield from () if within else self._settings.changed()
        for name, container, before in self._held.values():
            now = self._entries(container)
            for key in {**before, **now}:
                values = before.get(key, MISSING), now.get(key, MISSING)
                if not self._same(*values):
                    yield entry_name(name, key), *values
        yield from ((name, MISSING, held) for name, held in self._empty if held)
        names = [name for name, _ in (*self._tensors, *self._counted)]
        marks = zip(names, self._tensor_marks, self._tensor_marks_now(), strict=True)
        yield from (found for found in marks if found[1] != found[2])
        marked = [*zip(self._marked, self._marks, strict=True)]
        marked += [*zip(self._moving, self._places, strict=True)] if within else []
        found = ((name, before, mark(value)) for (name, value), before in marked)
        yield from (each for each in found if each[1] != each[2])
        modes = _modes()
        yield from ((n, mode, modes[n]) for n, mode in self._modes.items() if mode != modes[n])

    def restore(self) -> None:
        """Leaves attributes, entries and random generators as they were."""
        for _, container, entries in self._held.values():
            if not _is_of_libraries(container):
                _fill(container, self._entries(container), entries)
        for _, empty in self._empty:
            empty.clear()
        for (_, value), place in zip(self._moving, self._places, strict=True):
            if type(value) in GENERATORS:
                set_state(value, place)

    # -- a look by identity -----------------------------------------------------------------------
    def _remember(self) -> None:
        """Keeps what is there now."""
        for key, (name, container, _) in self._held.items():
            self._held[key] = name, container, self._entries(container)
        self._settings.remember()
        held = [container for _, container, _ in self._held.values()]
        self._dicts = [each for each in held if isinstance(each, dict)]
        self._classes = [vars(each) for each in held if isinstance(each, type | ModuleType)]
        self._lists = [each for each in held if isinstance(each, list | deque | set)]
        attributes = [each for each in held if isinstance(each, Attributes)]
        self._attributes = [(each.value, n) for each in attributes for n in each.names.values()]
        self._empty_dicts = [each for _, each in self._empty]
        self._objects, self._lengths = [*self._objects_now()], self._lengths_now()
        self._tensor_marks = self._tensor_marks_now()
        self._marks = [mark(value) for _, value in self._marked]
        self._places = [mark(value) for _, value in self._moving]
        self._modes = _modes()

    def _is_same(self) -> bool:
        """Whether all is the very object that it was, and nothing was changed in place."""
        try:
            return (
                self._lengths_now() == self._lengths
                and all(map(is_, self._objects_now(), self._objects))
                and not any(self._empty_dicts)
                and next(self._settings.changed(), None) is None
                and self._tensor_marks_now() == self._tensor_marks
                and [mark(value) for _, value in self._marked] == self._marks
                and _modes() == self._modes
            )
        except RuntimeError:  # a thread has changed a dict meanwhile
            return False

    def _objects_now(self) -> Iterator[Any]:
        """Every value and key, at C's speed."""
        flat = chain.from_iterable
        return chain(
            flat(map(dict.values, self._dicts)),
            flat(map(dict.keys, self._dicts)),
            flat(each.values() for each in self._classes),
            flat(self._lists),
            (_attribute(value, name) for value, name in self._attributes),
        )

    def _lengths_now(self) -> list[int]:
        return [*map(dict.__len__, self._dicts), *map(len, self._classes), *map(len, self._lists)]

    def _tensor_marks_now(self) -> list[Any]:
        """What of a tensor is not its value; then the number of writes to those that count."""
        tensors = (tensor for _, tensor in self._tensors)
        return [*map(of_tensor, tensors), *(tensor._version for _, tensor in self._counted)]

    def _same(self, before: Any, now: Any) -> bool:
        return same(before, now) or (self._is_left_out(before) and self._is_left_out(now))

    def _is_left_out(self, value: Any) -> bool:
        return bool(self._left_out and isinstance(value, Tensor) and self._left_out(value))

    def _entries(self, container: Any) -> Entries:
        hidden = self._hidden.get(id(container))
        entries = _entries(container)
        return {k: v for k, v in entries.items() if k not in hidden} if hidden else entries

    # -- what there is ----------------------------------------------------------------------------
    def _look(self, root: str, value: Any) -> None:
        """Keeps all that a root holds."""
        todo = [(root, value, 0)]
        while todo:
            name, value, depth = todo.pop()
            kind: Any = type(value)
            if issubclass(kind, PLAIN) or id(value) in self._seen:
                continue
            depth += is_of_library(kind) and not is_namespace(kind)
            if issubclass(kind, dict) and not value:
                self._seen[id(value)] = value
                self._empty.append((name, value))
            elif depth <= MOST_NESTED:
                self._seen[id(value)] = value
                found = [(key, inner, depth) for key, inner in self._keep(root, name, value)]
                todo += reversed(found)

    def _keep(self, root: str, name: str, value: Any) -> Found:
        """Keeps a value; yields what it holds."""
        kind: Any = type(value)
        if issubclass(kind, Tensor):
            yield from self._keep_tensor(root, name, value)
        elif issubclass(kind, (*CONTAINERS, tuple, frozenset)):
            entries = self._hold(name, value) if issubclass(kind, CONTAINERS) else _entries(value)
            if len(entries) <= MOST_ENTRIES:
                yield from ((entry_name(name, key), inner) for key, inner in entries.items())
            yield kind.__name__, getattr(value, "__dict__", None)
        elif kind in GENERATORS or issubclass(kind, Iterator):
            self._moving.append((name, value))
            yield kind.__name__, getattr(value, "__dict__", None)
            yield from ((entry_name(name, key), held) for key, held in held_in(value).items())
        elif issubclass(kind, ModuleType):
            yield from self._keep_names(value) if of_user(value.__name__) else ()
        elif issubclass(kind, type):
            yield from self._keep_class(value) if of_user(value.__module__) else ()
        elif issubclass(kind, FunctionType):
            yield from self._keep_function(value)
        elif issubclass(kind, WRAPPERS):
            yield from ((name, getattr(value, wrapped, None)) for wrapped in WRAPPED)
        elif issubclass(kind, ContextVar):
            yield from self._hold(name, Attributes(value, {"value": "value"})).items()
        elif issubclass(kind, SynchronizedBase) or is_buffer(value):
            yield from self._keep_memory(name, value)
        elif is_data_set(kind):
            self._data_sets.append(value)
        elif is_settings(kind):
            yield from self._keep_object(value)

    def _keep_memory(self, name: str, value: Any) -> Found:
        """Keeps what is changed in place without a trace: an array, a multiprocessing.Value."""
        if isinstance(value, SynchronizedBase):
            yield name, value.get_obj()
            return
        if getattr(value, "mode", "") != "r":  # a file that nothing writes
            self._marked.append((name, value))
        if isinstance(value, np.ndarray) and value.dtype.hasobject:
            yield from ((name, inner) for inner in value.flat[:MOST_ENTRIES])

    def _keep_tensor(self, root: str, name: str, tensor: Tensor) -> Found:
        if self._is_left_out(tensor):
            return
        self._tensors.append((name, tensor))
        yield name, vars(tensor)
        yield name, tensor._backward_hooks
        own = tensor.device.type
        # A program writes those of a TPU without counting.
        is_counted = own == "cpu" if self._left_out is None else own != "tpu"
        if is_counted and not tensor.is_inference():
            self._counted.append((name, tensor))
        # An optimizer counts its steps there.
        if own == "cpu" and root != "optimizer":
            self._marked.append((name, tensor))

    def _keep_object(self, value: Any) -> Found:
        kind: Any = type(value)
        if not is_of_library(kind):
            yield from self._keep_class(kind)
        yield kind.__name__, getattr(value, "__dict__", None)
        spaces = (vars(each).items() for each in kind.__mro__ if of_user(each.__module__))
        slots = {n: n for space in spaces for n, v in space if isinstance(v, MemberDescriptorType)}
        if slots:
            yield from self._hold(kind.__name__, Attributes(value, slots)).items()

    def _keep_class(self, kind: type) -> Found:
        """A class and its bases; of a library's also the module, where its methods look."""
        for each in kind.__mro__[:-1]:
            if of_user(each.__module__):
                yield from self._keep_names(each)
            elif each.__module__ != "builtins":
                self._hold(each.__qualname__, each)
                self._hold(each.__module__, sys.modules.get(each.__module__, each))

    def _keep_names(self, space: Any) -> Found:
        name = space.__name__
        yield from (
            (entry_name(name, key), inner) for key, inner in self._hold(name, space).items()
        )

    def _keep_function(self, function: FunctionType) -> Found:
        name = function.__qualname__.replace("<locals>.", "")
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        yield name, vars(function)
        if not of_user(function.__module__):
            # It wraps a user's function, perhaps.
            inner = (_attribute(cell, "cell_contents") for _, cell in cells)
            yield from ((name, each) for each in inner if isinstance(each, FunctionType))
            return
        found = self._hold(name, Attributes(function, CODE))
        for key, cell in cells:
            found |= self._hold(name, Attributes(cell, {key: "cell_contents"}))
        yield from ((entry_name(name, key), inner) for key, inner in found.items())
        yield name, sys.modules.get(function.__module__ or "", function.__globals__)

    def _hold(self, name: str, container: Any) -> Entries:
        """What a container holds, where it is a new one."""
        if id(container) in self._held:
            return {}
        entries = self._entries(container)
        self._held[id(container)] = name, container, entries
        return entries


def _attribute(value: Any, name: str) -> Any:
    try:
        return getattr(value, name)
    except (AttributeError, ValueError):  # a slot or a cell that is empty still
        return value.get(None) if isinstance(value, ContextVar) else MISSING


def _entries(container: Any) -> Entries:
    if isinstance(container, dict):
        return dict(dict.items(container))
    if isinstance(container, Attributes):
        return {key: _attribute(container.value, name) for key, name in container.names.items()}
    if isinstance(container, type | ModuleType):
        return {key: value for key, value in vars(container).items() if key not in BESIDE}
    return dict(enumerate(container))


def _is_of_libraries(space: Any) -> bool:
    """Whether it is a module or class of a library, which imports parts of itself when used."""
    if isinstance(space, ModuleType):
        return not of_user(space.__name__)
    return isinstance(space, type) and not of_user(space.__module__)


def _fill(container: Any, now: Entries, before: Entries) -> None:
    """Gives a container what it held."""
    if isinstance(container, list):
        container[:] = before.values()
        return
    if isinstance(container, deque | set):
        container.clear()
        (container.extend if isinstance(container, deque) else container.update)(before.values())
        return
    for key in {**now, **before}:
        value = before.get(key, MISSING)
        if value is not now.get(key, MISSING):
            _set(container, key, value)


def _set(container: Any, key: Any, value: Any) -> None:
    if isinstance(container, dict):
        container.pop(key) if value is MISSING else container.__setitem__(key, value)
        return
    if isinstance(container, Attributes):
        container, key = container.value, container.names[key]
    if isinstance(container, ContextVar):
        container.set(value)
    else:
        delattr(container, key) if value is MISSING else setattr(container, key, value)


def _modes() -> Entries:
    """torch's modes that decide what its functions compute."""
    kinds = ("cpu", "cuda", "xla", "privateuseone")
    return {
        "autocast": [(torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds],
        "torch.inference_mode": torch.is_inference_mode_enabled(),
        "torch.set_grad_enabled": torch.is_grad_enabled(),
        "torch.set_default_dtype": torch.get_default_dtype(),
        "torch.use_deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "torch.autograd.set_detect_anomaly": torch.is_anomaly_enabled(),
        "attention": [allowed() for allowed in ATTENTION],
        "modes": (torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()),
    }
