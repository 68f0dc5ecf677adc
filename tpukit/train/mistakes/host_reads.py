"""Calls in a task's own code that cost or break a step: values read on the host, `.backward()`."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator

from torch import nn

from tpukit.train.mistakes.raised import is_users

READS = ("item", "tolist", "numpy", "cpu")
ON_THE_HOST = ("shape", "dtype", "device", "ndim")
"""Attributes of a tensor that are printed without its values."""


def code_warnings(loss: Callable[..., object], model: nn.Module) -> Iterator[str]:
    """A line for each call in the bodies of a task's `loss` and of its own modules' `forward`."""
    forwards = {type(module).forward: None for module in model.modules()}
    for method, name in [(loss, "the loss"), *((f, f.__qualname__) for f in forwards)]:
        for place, call in _calls(method):
            if call == ".backward()":
                yield f"Warning: {name} calls {call} at {place}: leave it out, the engine does it."
            else:
                yield (
                    f"Warning: {name} reads a value at {place} ({call}): on a TPU each step waits"
                    " for it."
                )


def _calls(method: Callable[..., object]) -> Iterator[tuple[str, str]]:
    """`my_task.py:31` and `.item()` of each call in a user's method's own body."""
    try:
        file = inspect.getsourcefile(method) or ""
        lines, first = inspect.getsourcelines(method)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and is_users(file) and (call := _named_call(node)):
            yield f"{file}:{first + node.lineno - 1}", call


def _named_call(node: ast.Call) -> str | None:
    if isinstance(node.func, ast.Attribute) and node.func.attr in (*READS, "backward"):
        return f".{node.func.attr}()"
    if isinstance(node.func, ast.Name) and node.func.id == "print":
        return "print" if any(map(_has_values, node.args)) else None
    return None


def _has_values(node: ast.AST) -> bool:
    """Whether a printed expression may be a tensor's values: not its shape, nor a constant."""
    if isinstance(node, ast.Attribute) and node.attr in ON_THE_HOST:
        return False
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "len":
        return False
    return isinstance(node, ast.Name) or any(map(_has_values, ast.iter_child_nodes(node)))
