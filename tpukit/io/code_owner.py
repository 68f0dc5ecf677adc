"""Whose a source file is: the one definition of what is a user's own code."""

import sysconfig
from functools import cache
from pathlib import Path
from typing import Literal

Owner = Literal["user", "task", "tpukit", "library", "python"]
"""A user's file, one of a task that comes with tpukit, the rest of tpukit, an installed package, or
Python itself and code without a file."""

PACKAGE = f"{Path(__file__).parents[1]}/"
_TASKS = f"{PACKAGE}tasks/"
_LIBRARIES = ("/site-packages/", "/dist-packages/")
_PYTHON = (f"{sysconfig.get_path('stdlib')}/", f"{sysconfig.get_path('platstdlib')}/", "<")


@cache
def owner_of(file: str) -> Owner:
    """Whose a file of this installation is, by its path."""
    if file.startswith(PACKAGE):
        return "task" if file.startswith(_TASKS) else "tpukit"
    if any(part in file for part in _LIBRARIES):
        return "library"
    return "python" if file.startswith(_PYTHON) else "user"


def is_users(file: str) -> bool:
    """Whether a file belongs neither to tpukit nor to a library nor to Python."""
    return owner_of(file) == "user"


def is_model_code(file: str) -> bool:
    """Whether a file is a user's or a task's: what is learned, not what runs it."""
    return owner_of(file) in ("user", "task")
