"""Installed tasks by name, a user's own by file and class, or as a class or object in Python."""

import dataclasses
import difflib
import inspect
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakSet

from tpukit.errors import ConfigError
from tpukit.io.hub_data import is_hub_data
from tpukit.io.mirror import local_copy
from tpukit.io.remote import address_of
from tpukit.knowledge.setting_names import nearest_setting
from tpukit.registry.declared import current_name, registered
from tpukit.train.checks import described
from tpukit.train.config import TrainConfig
from tpukit.train.optional_methods import OptionalMethods
from tpukit.train.task import Task
from tpukit.train.user_code import (
    USER_MODULE,
    import_user_file,
    import_user_module,
    place_of,
    task_failure,
)

SIGNATURES = {
    "build_model": "def build_model(self, ops): return MyModel()",
    "datasets": "def datasets(self): return Datasets(train, valid)",
    "loss": 'def loss(self, model, batch): return {"loss": ...}',
}
"""What every task must define, as an example."""
NAMED_HERE: WeakSet[type[Task]] = WeakSet()
"""Classes that declare no name: a subclass is another task."""
SESSION = "__main__"
"""The module of a notebook's cells, an interactive session, or the script that runs."""


def find_task(spec: str) -> type[Task]:
    """The class of a registered name, `my_file.py:MyTask`, `package.module:MyTask`, which
    `FOLDER:` may precede, or `__main__:MyTask` (this session's).

    Raises ConfigError naming what is wrong with it.
    """
    if (name := current_name(spec)) != spec:
        _say_renamed(spec, name)
        spec = name
    if spec in registered():
        module, _, name = registered()[spec].partition(":")
        cls = _class_of(import_user_module(module, None, "--task"), name, module)
        cls.name = getattr(cls, "name", spec)
        return own_class(cls)
    place, _, name = spec.rpartition(":")
    folder, _, module = place.rpartition(":")
    if place == SESSION:
        return _class_in_session(name)
    if place.endswith(".py"):
        path = Path(place).resolve()
        loaded = _loaded_module(path) or import_user_file(path, "--task")
        return own_class(_class_of(loaded, name, str(path)), f"{path}:{name}")
    if all(part.isidentifier() for part in module.split(".")):
        return own_class(
            _class_of(import_user_module(module, Path(folder), "--task"), name, module)
        )
    near = difflib.get_close_matches(spec, registered(), n=1)
    raise ConfigError(
        f"--task {spec!r}: there is no such task.",
        f"Did you mean {near[0]}?"
        if near
        else f"There are {', '.join(registered())}, or your own as my_file.py:MyTask.",
    )


@cache
def _say_renamed(earlier: str, name: str) -> None:
    text = f"--task {earlier} is --task {name} now; the earlier name goes with the next release."
    print(text, file=sys.stderr)


def load_task(spec: str, settings: Mapping[str, Any], data_path: str) -> Task:
    """The task by name or `FILE:CLASS`, with its settings."""
    return make_task(find_task(spec), settings, data_path)


def _class_in_session(name: str) -> type[Task]:
    found: Any = getattr(sys.modules[SESSION], name, None)
    if not _is_task(found):
        raise ConfigError(
            f"The task class {name} was defined in a notebook or script that is not this one.",
            "Save it in a file and name that with --task FILE:CLASS (in Python: task=).",
        )
    return own_class(found)


def _class_of(module: ModuleType, name: str, place: str) -> type[Task]:
    found: Any = getattr(module, name, None)
    if not _is_task(found):
        own = [n for n, c in vars(module).items() if _is_task(c) and c is not Task]
        raise ConfigError(
            f"--task: {place} has no task class {name!r}.",
            f"It has {', '.join(own)}." if own else "Subclass tpukit.Task there.",
        )
    cls: type[Task] = found
    return cls


def _loaded_module(path: Path) -> ModuleType | None:
    """The module that this program has imported from a file already, if it has."""
    for module in [*sys.modules.values()]:
        file = getattr(module, "__file__", None)
        is_it = file and file.endswith(path.name) and Path(file).resolve() == path
        if is_it and not module.__name__.startswith(USER_MODULE):
            return module
    return None


def _is_task(found: Any) -> bool:
    return isinstance(found, type) and issubclass(found, Task)


def own_class(cls: type[Task], source: str | None = None) -> type[Task]:
    """A task class with its name and its source, as a run records them.

    Raises ConfigError for a method that cannot be called as tpukit calls the one of its name.
    """
    _require_signatures(cls)
    named = next((base for base in cls.__mro__ if vars(base).get("name")), None)
    if named is None or (named in NAMED_HERE and named is not cls):
        cls.name = cls.__name__.lower()
        NAMED_HERE.add(cls)
    if "source" not in vars(cls) and not cls.__module__.startswith("tpukit."):
        cls.source = source or _source_of(cls)
    return cls


def _source_of(cls: type[Task]) -> str:
    """`FILE:CLASS`, in a package `FOLDER:MODULE:CLASS`; `__main__:CLASS` of a notebook's cell."""
    module = sys.modules.get(cls.__module__)
    file = getattr(module, "__file__", None)
    if file is None:
        return f"{SESSION}:{cls.__qualname__}"
    path, spec = Path(file).resolve(), getattr(module, "__spec__", None)
    if spec is None or not spec.parent:
        return f"{path}:{cls.__qualname__}"
    return f"{path.parents[spec.parent.count('.') + 1]}:{spec.name}:{cls.__qualname__}"


def make_task(cls: type[Task], settings: Mapping[str, Any], data_path: str) -> Task:
    """The task with its own settings; `data_path` goes to a constructor that takes one.

    Raises ConfigError for a setting the task does not have.
    """
    accepted = accepted_settings(cls)
    unknown = [name for name in settings if accepted is not None and name not in accepted]
    if unknown:
        known = [*(accepted or ()), *(field.name for field in dataclasses.fields(TrainConfig))]
        near = nearest_setting(unknown[0], known)
        there = f"Did you mean {near}?" if near else f"It has {', '.join(sorted(accepted or ()))}."
        raise ConfigError(
            f"Task {cls.name!r} has no setting {unknown[0]!r}.",
            cls.earlier_settings.get(unknown[0], there),
        )
    if accepted is None or "data_path" in accepted:
        settings = {"data_path": data_path, **settings}
    given = settings.get("data_path", "")
    if address_of(given) and not is_hub_data(given):  # of those `Task`s read what they need
        settings = {**settings, "data_path": str(local_copy(given))}
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


def default_data_path(cls: type[Task]) -> str:
    """The data path that a class has by itself where none is given, else ./data."""
    own = [cls.options, *cls.__mro__]
    for init in (vars(base)["__init__"] for base in own if base and "__init__" in vars(base)):
        if parameter := inspect.signature(init).parameters.get("data_path"):
            given = parameter.default
            return str(given) if isinstance(given, str | Path) else TrainConfig.data_path
    return TrainConfig.data_path


def _require_methods(cls: type[Task]) -> None:
    """Raises ConfigError where a class lacks methods that every task must define."""
    missing = [name for name in SIGNATURES if name in getattr(cls, "__abstractmethods__", ())]
    if missing:
        raise ConfigError(
            f"{place_of(cls)} does not define {', '.join(f'`{name}`' for name in missing)}.",
            f"Add {'; '.join(f'`{SIGNATURES[name]}`' for name in missing)}.",
            id="task-methods",
        )


def _require_signatures(cls: type[Task]) -> None:
    for name, method in {**vars(Task), **vars(OptionalMethods)}.items():
        own = getattr(cls, name, method)
        if name.startswith("_") or not inspect.isfunction(method) or own is method:
            continue
        given = [*inspect.signature(method).parameters]
        is_bound = isinstance(inspect.getattr_static(cls, name), staticmethod | classmethod)
        if problem := _why_not_called(own, given[is_bound:]):
            raise ConfigError(
                f"{place_of(own) if callable(own) else f'{cls.__name__}.{name}'} {problem};"
                f" tpukit calls a task's `{name}` itself, with ({', '.join(given[1:])}).",
                f"Rename it, or define `def {name}({', '.join(given)})`.",
                id="task-methods",
            )


def _why_not_called(method: Any, arguments: list[str]) -> str | None:
    if not callable(method):
        return f"is {described(method)}"
    try:
        signature = inspect.signature(method)
    except ValueError:  # of a built-in function
        return None
    try:
        signature.bind(*arguments)
    except TypeError:
        return f"takes {signature}"
    return None


def accepted_settings(cls: type[Task]) -> set[str] | None:
    """Names of the settings a task's constructor takes; None where it takes any."""
    if cls.options is None and cls.__init__ is Task.__init__:
        return set()
    parameters = inspect.signature(cls.options or cls).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return None
    return set(parameters)
