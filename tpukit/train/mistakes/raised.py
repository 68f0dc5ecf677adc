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
from types import FrameType, TracebackType

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
    "not compiled with CUDA|NVIDIA driver|No CUDA GPUs":
        'Leave `.cuda()` and device="cuda" out of a task: batches and the model are on the device'
        " of the run, and new tensors take `device=x.device`.",
    "Expected XLA tensor|on the same device|not on the XLA device":
        "Leave `.cpu()`, `.cuda()` and `.to(...)` out of a task: batches and the model are on the"
        " device of the run, and new tensors take `device=x.device`.",
    r"to numpy\.|call numpy\(\)":
        "Compute with torch in `loss` and `forward`: NumPy gives no gradient and leaves the device."
        " Metrics in NumPy belong into `compute`.",
    r"\.loss raised .*NoneType":
        "Something is None: does the model's `forward` end with `return`?",
}  # fmt: skip
"""A pattern in `Task.method raised Error: text` -> what a task does about it."""


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
    method, (frame, line) = calls[0][0].f_code.co_qualname, calls[-1]
    code = frame.f_code
    inside = "" if code.co_qualname == method else f" in {code.co_qualname}"
    source = linecache.getline(code.co_filename, line).strip()
    cause = cause_line(error)
    what = f"{method} raised {cause}"
    failure = TaskFailedError(
        f"{what}, at {code.co_filename}:{line}{inside}" + (f": `{source}`." if source else "."),
        _entries_instead(error, frame, source)
        or next((hint for pattern, hint in HINTS.items() if re.search(pattern, what)), None),
    )
    failure.add_note("".join(traceback.format_exception(error)))
    return failure


def _entries_instead(error: BaseException, frame: FrameType, source: str) -> str | None:
    """What a dict of the user's has where a key of it is missing: a batch, or a sample."""
    if not isinstance(error, KeyError):
        return None
    for name, value in frame.f_locals.items():
        if isinstance(value, dict) and error.args[0] not in value and f"{name}[" in source:
            return f"`{name}` has {', '.join(map(repr, value)) or 'no entries'}."
    return None


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


def _users_calls(trace: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    """The user's functions, outermost first, that tpukit's own call."""
    within = False
    for frame, line in traceback.walk_tb(trace):
        file = frame.f_code.co_filename
        within = within or file.startswith(PACKAGE)
        if within and is_users(file):
            yield frame, line
