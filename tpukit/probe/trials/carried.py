"""Sends a task object to the child processes of a search.

The task is pickled, with the classes and functions of a notebook's cells by value, into a temporary
folder of the search that only its user can write to.
"""

from __future__ import annotations

import pickle
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import cloudpickle

from tpukit.errors import ConfigError
from tpukit.probe.trial import TaskSource
from tpukit.train.mistakes.imported import USER_MODULE
from tpukit.train.task import Task


@contextmanager
def carried(task: Task) -> Iterator[TaskSource]:
    """The source from which a child loads this object, valid inside the context.

    Raises ConfigError where the task cannot be pickled (an open file, a lock).
    """
    with tempfile.TemporaryDirectory(prefix="tpukit-task-") as folder:
        file = Path(folder) / "task.pickle"
        try:
            file.write_bytes(pickle.dumps(sys.path) + _by_value(task))
        except Exception as error:
            raise ConfigError(
                f"the task {task.name!r} cannot be sent to the processes of the trials:"
                f" {type(error).__name__}: {error}.",
                "Open files, connections and data in `datasets`, not in the constructor.",
            ) from error
        yield TaskSource(f"{__name__}:carried_task", {"file": str(file)})


def carried_task(file: str) -> Task:
    """The task in a child; it imports from where its parent does."""
    with Path(file).open("rb") as stream:
        sys.path[:] = pickle.load(stream)
        task: Task = pickle.load(stream)
    return task


def _by_value(task: Task) -> bytes:
    """The pickled task; the class is included where its module is a file given by its path."""
    module = sys.modules[type(task).__module__]
    by_path = module.__name__.startswith(USER_MODULE)
    if by_path:
        cloudpickle.register_pickle_by_value(module)
    try:
        content: bytes = cloudpickle.dumps(task)
    finally:
        if by_path:
            cloudpickle.unregister_pickle_by_value(module)
    return content
