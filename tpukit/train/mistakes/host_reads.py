"""Values that a task's `loss` reads on the host: on a TPU every step would wait for them."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable

from tpukit.train.mistakes.raised import is_users

READS = ("item", "tolist", "numpy", "cpu")


def host_reads(method: Callable[..., object]) -> list[str]:
    """`my_task.py:31 (.item())` of each read in a user's method's own body."""
    try:
        file = inspect.getsourcefile(method) or ""
        lines, first = inspect.getsourcelines(method)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):
        return []
    calls = [n.func for n in ast.walk(tree) if isinstance(n, ast.Call)]
    return [
        f"{file}:{first + call.lineno - 1} (.{call.attr}())"
        for call in calls
        if isinstance(call, ast.Attribute) and call.attr in READS and is_users(file)
    ]
