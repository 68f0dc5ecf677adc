"""An exception in a user's own code: which method, at which line of which file.

Everything is read from the traceback, so no call of a task's method has to be wrapped.
"""

from __future__ import annotations

import inspect
import linecache
import re
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, TracebackType

from tpukit.errors import TaskFailedError, TpukitError

PACKAGE = f"{Path(__file__).parents[2]}/"
LIBRARIES = ("/site-packages/", "/dist-packages/")
STANDARD_LIBRARY = f"{sysconfig.get_path('stdlib')}/"
LONGEST_CAUSE = 300
HINTS = {
    r"\b(?:double|Double|float64)\b":
        "An input is float64, NumPy's default, and the weights are not: convert it in the data set,"
        " `array.astype(np.float32)`.",
    "does not require grad and does not have a grad_fn":
        "Validation runs without gradients: derivatives with respect to inputs need"
        " `with torch.enable_grad():` around them in `loss`.",
}  # fmt: skip
"""A pattern in an exception's text -> what a task does about it."""


def task_failure(error: BaseException) -> TaskFailedError | None:
    """What the user's own code raised, where it is in the traceback; else None.

    The method is the first of the user's functions that tpukit called, the line the innermost.
    """
    if isinstance(error, TpukitError):
        return error if isinstance(error, TaskFailedError) else None
    calls = list(_users_calls(error.__traceback__))
    # The death of a DataLoader worker is raised wherever the main thread is.
    if not calls or str(error).startswith("DataLoader worker (pid"):
        return None
    method, (code, line) = calls[0][0].co_qualname, calls[-1]
    inside = "" if code.co_qualname == method else f" in {code.co_qualname}"
    source = linecache.getline(code.co_filename, line).strip()
    cause = cause_line(error)
    failure = TaskFailedError(
        f"{method} raised {cause}, at {code.co_filename}:{line}{inside}"
        + (f": `{source}`." if source else "."),
        next((hint for pattern, hint in HINTS.items() if re.search(pattern, cause)), None),
    )
    failure.add_note("".join(traceback.format_exception(error)))
    return failure


def cause_line(error: BaseException) -> str:
    """`KeyError: 'label'`: type and text of an exception in one line."""
    text = " ".join(str(error).split())
    text = text if len(text) <= LONGEST_CAUSE else text[: LONGEST_CAUSE - 3] + "..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def place_of(code: Callable[..., object] | type) -> str:
    """`Toy.loss (my_task.py:31)`; the name alone where there is no Python source."""
    name = getattr(code, "__qualname__", type(code).__qualname__)
    try:
        file = inspect.getsourcefile(code)
        line = inspect.getsourcelines(code)[1]
    except (OSError, TypeError):
        return name
    return f"{name} ({file}:{line})"


def is_users(file: str) -> bool:
    """Whether a source file belongs neither to tpukit nor to a library."""
    return not (
        file.startswith((PACKAGE, STANDARD_LIBRARY, "<")) or any(part in file for part in LIBRARIES)
    )


def _users_calls(trace: TracebackType | None) -> Iterator[tuple[CodeType, int]]:
    """The user's functions, outermost first, that tpukit's own call."""
    within = False
    for frame, line in traceback.walk_tb(trace):
        file = frame.f_code.co_filename
        within = within or file.startswith(PACKAGE)
        if within and is_users(file):
            yield frame.f_code, line
