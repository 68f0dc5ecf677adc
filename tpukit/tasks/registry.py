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
from tpukit.train.mistakes.raised import cause_line, place_of, task_failure
from tpukit.train.task import Task

BUILT_IN = {
    "eit": ("tpukit.tasks.eit.task", "EITTask"),
    "summarize": ("tpukit.tasks.summarize.task", "SummarizeTask"),
}


SIGNATURES = {
    "build_model": "def build_model(self, ops): return MyModel()",
    "datasets": "def datasets(self): return Datasets(train, valid)",
    "loss": 'def loss(self, model, batch): return {"loss": ...}',
}
"""What every task must define, as an example."""


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
        failure = task_failure(error)
        raise ConfigError(
            f"--task: {path} cannot be imported:"
            f" {failure.message if failure else cause_line(error)}",
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
    _require_methods(cls)
    try:
        return cls(**settings)
    except TypeError as error:
        if (failure := task_failure(error)) is not None:
            raise failure from error
        raise ConfigError(
            f"{place_of(cls)} cannot be made: {error}.",
            "Each parameter of its `__init__` is a setting (`--set NAME=VALUE`): give it a default"
            " value.",
        ) from error


def _require_methods(cls: type[Task]) -> None:
    """Raises ConfigError where a class lacks methods that every task must define."""
    missing = [name for name in SIGNATURES if name in getattr(cls, "__abstractmethods__", ())]
    if missing:
        raise ConfigError(
            f"{place_of(cls)} does not define {', '.join(f'`{name}`' for name in missing)}.",
            f"Add {'; '.join(f'`{SIGNATURES[name]}`' for name in missing)}.",
            id="task-methods",
        )


def accepted_settings(cls: type[Task]) -> set[str] | None:
    """Names of the settings a task's constructor takes; None where it takes any."""
    config = getattr(cls, "config_class", None)
    parameters = inspect.signature(config or cls).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return None
    return set(parameters)
