"""Built-in tasks by name, a user's own by file and class."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpukit.errors import ConfigError
from tpukit.train.task import Task

BUILT_IN = {
    "eit": ("tpukit.tasks.eit.task", "EITTask"),
    "summarize": ("tpukit.tasks.summarize.task", "SummarizeTask"),
}


def find_task(spec: str) -> type[Task]:
    """The class of `eit`, `summarize` or `my_file.py:MyTask`.

    Raises ConfigError naming what is wrong with it.
    """
    if spec in BUILT_IN:
        module, name = BUILT_IN[spec]
        found: type[Task] = getattr(importlib.import_module(module), name)
        return found
    path, separator, name = spec.rpartition(":")
    if not separator or not path.endswith(".py"):
        near = difflib.get_close_matches(spec, BUILT_IN, n=1)
        raise ConfigError(
            f"--task {spec!r}: there is no such task.",
            f"Did you mean {near[0]}?"
            if near
            else f"There are {', '.join(BUILT_IN)}, or your own as my_file.py:MyTask.",
        )
    return _class_in_file(Path(path), name)


def load_task(spec: str, settings: Mapping[str, Any], data_path: str) -> Task:
    """The task by name or `FILE:CLASS`, with its settings."""
    return make_task(find_task(spec), settings, data_path)


def _class_in_file(path: Path, name: str) -> type[Task]:
    if not path.is_file():
        raise ConfigError(f"--task: there is no file {path}.", "Check the path before the colon.")
    module_name = f"tpukit_user_task_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # DataLoader workers find the class again by its module's name.
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(
            f"--task: {path} cannot be imported: {type(error).__name__}: {error}.",
            f"`python {path}` shows the whole traceback.",
        ) from error
    found = getattr(module, name, None)
    if not (isinstance(found, type) and issubclass(found, Task)):
        own = [n for n, c in vars(module).items() if isinstance(c, type) and issubclass(c, Task)]
        own = [n for n in own if n != "Task"]
        raise ConfigError(
            f"--task: {path} has no task class {name!r}.",
            f"It has {', '.join(own)}." if own else "Subclass tpukit.train.task.Task there.",
        )
    if not getattr(found, "name", None):
        found.name = name.lower()
    found.source = f"{path.resolve()}:{name}"
    return found


def make_task(cls: type[Task], settings: Mapping[str, Any], data_path: str) -> Task:
    """The task with its own settings; `data_path` goes to a constructor that takes one.

    Raises ConfigError for a setting the task does not have.
    """
    accepted = accepted_settings(cls)
    unknown = [name for name in settings if accepted is not None and name not in accepted]
    if unknown:
        near = difflib.get_close_matches(unknown[0], accepted or (), n=1)
        raise ConfigError(
            f"Task {cls.name!r} has no setting {unknown[0]!r}.",
            f"Did you mean {near[0]}?" if near else f"It has {', '.join(sorted(accepted or ()))}.",
        )
    if accepted is None or "data_path" in accepted:
        settings = {"data_path": data_path, **settings}
    try:
        return cls(**settings)
    except TypeError as error:
        raise ConfigError(f"Task {cls.name!r} cannot be made: {error}.") from error


def accepted_settings(cls: type[Task]) -> set[str] | None:
    """Names of the settings a task's constructor takes; None where it takes any."""
    config = getattr(cls, "config_class", None)
    parameters = inspect.signature(config or cls).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return None
    return set(parameters)
