"""The values around an exception: plain types as they are, tensors as shape, dtype and device.

Imports the standard library alone: it runs within programs of other environments.
"""

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Iterator
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

_MOST_FRAMES = 8
"""Innermost frames whose values are recorded; of those outside of libraries as many more."""
_MOST_NAMES = 60
_MOST_ITEMS = 12
_LONGEST = 120
_DEPTH = 3
"""Attributes of attributes: `self.config.hidden_size`."""
_MOST_CHAINED = 8


def append_record(file: str, error: BaseException, thread: str = "") -> None:
    """Adds a line of JSON to a file that only its owner may read."""
    found = {"thread": thread, "path": sys.path, "chain": list(chain_of(error))}
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    with os.fdopen(descriptor, "a", encoding="utf-8", errors="replace") as out:
        out.write(json.dumps(found) + "\n")


def chain_of(error: BaseException) -> Iterator[dict[str, Any]]:
    """The exception, then those that it was raised from: class, message, frames with values."""
    inner: BaseException | None = error
    for _ in range(_MOST_CHAINED):
        if inner is None:
            return
        calls = list(traceback.walk_tb(inner.__traceback__))
        first = max(0, len(calls) - _MOST_FRAMES)
        users = [i for i in range(first) if "-packages" not in calls[i][0].f_code.co_filename]
        shown = {*users[-_MOST_FRAMES:], *range(first, len(calls))}
        outer = next((m for f, _ in calls if _is_model(m := f.f_locals.get("self"))), None)
        message = ""
        with contextlib.suppress(Exception):
            message = str(inner)[:2000]
        yield {
            "class": type(inner).__name__,
            "message": message,
            "frames": [
                {
                    "file": frame.f_code.co_filename, "line": line,
                    "names": _values(frame) if index in shown else {},
                    "module": _module_path(outer, frame.f_locals.get("self")),
                }
                for index, (frame, line) in enumerate(calls)
            ],
        }  # fmt: skip
        inner = inner.__cause__ or (None if inner.__suppress_context__ else inner.__context__)


def _values(frame: FrameType) -> dict[str, str]:
    """The plain values of a frame: locals, globals and attributes that its code names."""
    named, found = _names_of(frame.f_code), {}
    shared = {name: frame.f_globals[name] for name in named if name in frame.f_globals}
    for name, value in [*frame.f_locals.items(), *shared.items()]:
        for path, text in _described(name, value, named, _DEPTH):
            found[path] = text
            if len(found) >= _MOST_NAMES:
                return found
    return found


def _names_of(code: CodeType) -> set[str]:
    inner = [c for c in code.co_consts if isinstance(c, CodeType)]
    return {*code.co_names, *(name for c in inner for name in c.co_names)}


def _described(name: str, value: Any, named: set[str], depth: int) -> Iterator[tuple[str, str]]:
    """(path, text) of a value where it is plain, and of its attributes in the code."""
    if name.startswith("__"):
        return
    text = plain_text(value)
    if text:
        yield name, text
    if text or isinstance(value, (type, ModuleType, FunctionType)):
        return
    with contextlib.suppress(Exception):
        held = object.__getattribute__(value, "__dict__")
        modules = held.get("_modules") or {}
        if depth == _DEPTH and isinstance(modules, dict) and "_parameters" in held:
            yield name, f"{type(value).__name__}({_extra(value)})"
        for key, inner in [*held.items(), *modules.items()]:
            if key in named and depth:
                yield from _described(f"{name}.{key}", inner, named, depth - 1)


def _is_model(value: Any) -> bool:
    return "_modules" in getattr(value, "__dict__", ()) and "_parameters" in value.__dict__


def _module_path(model: Any, module: Any) -> str:
    """The name of a module within a model: `layers.3.mlp`; empty where it is not part of it."""
    pending, seen = [("", model)] if _is_model(module) else [], set[int]()
    while pending:
        name, inner = pending.pop()
        if inner is module:
            return name
        if id(inner) in seen:  # a part that holds the whole
            continue
        seen.add(id(inner))
        held = inner.__dict__.get("_modules") or {} if inner is not None else {}
        pending += [(f"{name}.{key}".lstrip("."), part) for key, part in held.items()]
    return ""


def _extra(module: Any) -> str:
    """A module's sizes as torch prints them: `in_features=128, out_features=10, bias=True`."""
    sizes = {
        key: value for key, value in vars(module).items()
        if type(value) in (int, float, bool, tuple) and key[0] != "_" and key != "training"
    }  # fmt: skip
    return ", ".join(f"{key}={value!r}" for key, value in list(sizes.items())[:6])


def plain_text(value: Any) -> str:
    """A plain value as Python writes it, cut; of an array its shape; of other objects nothing."""
    kind = type(value)
    if value is None or kind in (bool, int, float, complex, str):
        is_long = kind is str and len(value) > _LONGEST
        return repr(value[:_LONGEST] + "..." if is_long else value)
    if kind in (list, tuple, set, frozenset):
        return _collection(kind.__name__, value)
    if kind is dict or kind.__name__ in ("BatchEncoding", "BatchFeature", "OrderedDict"):
        keys = [repr(key)[:40] for key in list(value)[: 2 * _MOST_ITEMS]]
        return f"dict({', '.join(keys)}{', ...' if len(value) > len(keys) else ''})"
    if kind.__module__ == "torch" and kind.__name__ in ("dtype", "device", "Size"):
        return str(value)
    return _array(value)


def _collection(kind: str, value: Any) -> str:
    items = [plain_text(item) for item in list(value)[:_MOST_ITEMS]]
    if not all(items) or any(type(item) in (list, dict, tuple) for item in value):
        return f"{kind} of {len(value)}"
    more = ", ..." if len(value) > _MOST_ITEMS else ""
    return f"{kind}({', '.join(items)}{more})"[: 3 * _LONGEST]


def _array(value: Any) -> str:
    """Shape, dtype and device of a tensor or an array; empty for another object."""
    shape, dtype = _attribute(value, "shape"), _attribute(value, "dtype")
    if shape is None or dtype is None or isinstance(value, type):
        return ""
    device = _attribute(value, "device")
    sizes = tuple(shape) if hasattr(shape, "__iter__") else shape
    return f"{type(value).__name__}{sizes} {dtype}" + (f" {device}" if device is not None else "")


def _attribute(value: Any, name: str) -> Any:
    """An attribute of a tensor or an array; None for other objects, whose code may do anything."""
    roots = {base.__module__.partition(".")[0] for base in type(value).__mro__}
    try:
        return getattr(value, name) if roots & {"torch", "numpy", "jax", "jaxlib"} else None
    except Exception:
        return None
