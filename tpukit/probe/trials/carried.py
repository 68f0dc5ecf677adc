"""Sends a task object to the child processes of a search.

The task is pickled, with the classes and functions of a notebook's cells by value, into a temporary
folder of the search that only its user can write to.
"""

import copy
import copyreg
import operator
import pickle
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.machinery import PathFinder
from pathlib import Path

import cloudpickle
import torch.nn.attention
from torch import nn

from tpukit.errors import ConfigError
from tpukit.probe.trial import TaskSource
from tpukit.train.task import Task
from tpukit.train.user_code import USER_MODULE, import_as, import_places

# Under the names that torch gives them (seen in 2.9) these two are not found.
copyreg.pickle(type(torch.ops), lambda _: (operator.attrgetter("ops"), (torch,)))
copyreg.pickle(
    torch.nn.attention.SDPBackend,
    lambda kind: (operator.attrgetter(f"SDPBackend.{kind.name}"), (torch.nn.attention,)),
)


def copied(model: nn.Module) -> nn.Module:
    """A copy whose functions, too, use the copy's modules: `copy.deepcopy` shares closures, and
    copies what cannot be pickled."""
    try:
        with _sendable(map(type, model.modules())):
            made: nn.Module = pickle.loads(cloudpickle.dumps(model))
    except Exception:  # whatever a user's object raises
        return copy.deepcopy(model)
    return made


@contextmanager
def carried(task: Task, parts: Iterable[object] = ()) -> Iterator[TaskSource]:
    """The source from which a child loads this object, valid inside the context.

    parts: classes and functions that it holds, whose modules a child may not find by name.

    Raises ConfigError where the task cannot be pickled (an open file, a lock).
    """
    with tempfile.TemporaryDirectory(prefix="tpukit-task-") as folder:
        file = Path(folder) / "task.pickle"
        try:
            file.write_bytes(pickle.dumps(import_places()) + _by_value(task, parts))
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
        import_as(*pickle.load(stream))
        task: Task = pickle.load(stream)
    return task


def _by_value(task: Task, parts: Iterable[object]) -> bytes:
    """The pickled task; what is in a module that is a file given by its path is included."""
    parts = list(parts)
    names = {str(getattr(part, "__module__", None)) for part in (type(task), *parts)}
    with ExitStack() as registered:
        for module in (sys.modules[name] for name in names if not _is_found(name)):
            cloudpickle.register_pickle_by_value(module)
            registered.callback(cloudpickle.unregister_pickle_by_value, module)
        registered.enter_context(_sendable(parts))
        content: bytes = cloudpickle.dumps(task)
    return content


@contextmanager
def _sendable(kinds: Iterable[object]) -> Iterator[None]:
    """Takes away, meanwhile, torch's refusal to pickle modules with parametrizations (weight_norm):
    their classes are made at run time and go by value."""
    name = "__getstate__"
    made = [k for k in set(kinds) if getattr(k, "__name__", "").startswith("Parametrized")]
    kept = [(kind, vars(kind)[name]) for kind in made if name in vars(kind)]
    for kind, _ in kept:
        delattr(kind, name)
    try:
        yield
    finally:
        for kind, refusal in kept:
            setattr(kind, name, refusal)


def _is_found(name: str) -> bool:
    """Whether a child process that imports this name gets the module that is loaded here."""
    module = sys.modules.get(name)
    if name.startswith(USER_MODULE):
        return module is None
    file = getattr(module, "__file__", None)
    parent = sys.modules.get(name.rpartition(".")[0])
    found = PathFinder.find_spec(name, getattr(parent, "__path__", None)) if file else None
    return file is None or (found is not None and found.origin == file)
