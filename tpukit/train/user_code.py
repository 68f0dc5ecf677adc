"""A user's own code: importing its file, the errors it raises, calls that cost a step.

Errors are read from the traceback, so no call of a task's method has to be wrapped.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import linecache
import os
import re
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import TYPE_CHECKING

from tpukit.errors import ConfigError, TaskFailedError, TpukitError
from tpukit.io.code_owner import is_users, owner_of

if TYPE_CHECKING:
    from torch import nn

# -- what it raises -------------------------------------------------------------------------------
LONGEST_CAUSE = 300
HINTS = {
    r"\b(?:double|Double|float64)\b":
        "An input is float64, NumPy's default, and the weights are not: convert it in the data set,"
        " `array.astype(np.float32)`.",
    "does not require grad and does not have a grad_fn":
        "Validation runs without gradients: derivatives with respect to inputs need"
        " `with torch.enable_grad():` around them in `loss`.",
    "not compiled with CUDA|NVIDIA driver|No CUDA GPUs|CUDA driver|two different devices":
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
        file = inspect.getsourcefile(inspect.unwrap(code))
        line = inspect.getsourcelines(code)[1]
    except (OSError, TypeError):
        return name
    return f"{name} ({file}:{line})"


def _users_calls(trace: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    """The user's functions, outermost first, that tpukit's own call."""
    within = False
    for frame, line in traceback.walk_tb(trace):
        file = frame.f_code.co_filename
        within = within or owner_of(file) in ("tpukit", "task")
        if within and is_users(file):
            yield frame, line


# -- importing it --------------------------------------------------------------------------------
USER_MODULE = "tpukit_user_"
"""What the names of such modules begin with."""
_importing: set[str] = set()
_imported: dict[Path, tuple[bytes, ModuleType]] = {}
"""The user's files that were imported: content and module."""
_folders: dict[str, frozenset[str]] = {}
"""The folders of the user's files, and the modules that were there before each."""


def import_user_file(path: Path, option: str) -> ModuleType:
    """The module of a file that an option names; the same one again until the file changes.

    Raises ConfigError where it cannot be imported.
    """
    refuse_while_importing()
    if not path.is_file():
        raise ConfigError(f"{option}: there is no file {path}.", "Check the path before the colon.")
    module_name = f"{USER_MODULE}{option.strip('-')}_{path.stem}"
    content, place = path.read_bytes(), path.resolve()
    before, known = _imported.get(place, (None, None))
    if known is not None and before == content and known is sys.modules.get(module_name):
        import_from(place.parent)
        return known
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # DataLoader workers find a class again by its module's name.
    sys.modules[module_name] = module
    import_from(place.parent)
    with _failure_named(str(path), option, f"`python {path}` shows the whole traceback."):
        spec.loader.exec_module(module)
    _imported[place] = content, module
    return module


def import_user_module(name: str, folder: Path | None, option: str) -> ModuleType:
    """The module `package.module`, of a folder or installed; None: installed.

    Raises ConfigError where it cannot be imported.
    """
    refuse_while_importing()
    hint = "Reinstall the package that it is in."
    if folder is not None:
        import_from(folder.resolve())
        hint = f"Name a file (my_file.py:NAME), or a module of {folder} or an installed one."
    with _failure_named(name, option, hint):
        return importlib.import_module(name)


@contextmanager
def _failure_named(place: str, option: str, hint: str) -> Iterator[None]:
    _importing.add(place)
    try:
        yield
    except TpukitError:
        raise
    except Exception as error:
        failure = task_failure(error)
        cause = failure.message if failure else cause_line(error)
        if "no known parent package" in cause:
            hint = "Name its module from the folder above: --task PACKAGE.MODULE:CLASS."
        raise ConfigError(f"{option}: {place} cannot be imported: {cause}", hint) from error
    finally:
        _importing.discard(place)


def refuse_while_importing() -> None:
    """Raises ConfigError where a script that uses tpukit is imported for what it defines."""
    for place in _importing:
        raise ConfigError(
            f"{place} runs tpukit while it is imported.",
            'Put what it runs under `if __name__ == "__main__":`.',
        )


# -- what lies beside it -------------------------------------------------------------------------
def import_from(folder: Path) -> None:
    """Has imports find the modules of a folder first, as `python FILE` does, in this process and
    in those that it starts; the standard library's names stay its own."""
    place = str(folder)
    _forget_namesakes(place)
    if place in _folders and place in sys.path:
        sys.path.remove(place)
    sys.path.insert(0, place)
    _keep_standard_library([place])


def import_places() -> tuple[list[str], list[str]]:
    """`sys.path`, and those of its folders that `import_from` has put there."""
    return [*sys.path], [*_folders]


def import_as(path: list[str], folders: list[str]) -> None:
    """Has imports find what they find in the process that `import_places` was called in.

    What only this process has in PYTHONPATH stays first: the TPU compiler's own packages.
    """
    # `sys.path` has the folders of PYTHONPATH as absolute paths.
    own = map(os.path.abspath, filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    sys.path[:] = [*(place for place in own if place not in path), *path]
    _keep_standard_library(folders)


def _keep_standard_library(folders: Iterable[str]) -> None:
    for folder in folders:
        _folders.setdefault(folder, frozenset(sys.modules))
    if StandardLibraryFirst not in map(type, sys.meta_path):
        sys.meta_path.insert(0, StandardLibraryFirst())


def _forget_namesakes(folder: str) -> None:
    """Drops what another of these folders gave under a name that this one has too (`model`)."""
    own = {path.stem for path in Path(folder).glob("*") if path.suffix == ".py" or path.is_dir()}
    for name in [name for name in sys.modules if name.partition(".")[0] in own]:
        file = getattr(sys.modules[name], "__file__", None) or ""
        others = (
            file.startswith(other + os.sep) and name not in before
            for other, before in _folders.items()
        )
        if any(others) and not file.startswith(folder + os.sep):
            del sys.modules[name]


class StandardLibraryFirst(MetaPathFinder):
    """Finds the standard library's modules where it is: tpukit imports some of them later, and an
    `html.py` beside a task's file is none of them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if path is not None or fullname not in sys.stdlib_module_names:
            return None
        return PathFinder.find_spec(fullname, [p for p in sys.path if p not in _folders], target)


# -- calls that cost or break a step -------------------------------------------------------------
READS = ("item", "tolist", "numpy", "cpu")
OF_THE_LOOP = ("backward", "zero_grad")
ON_THE_HOST = ("shape", "dtype", "device", "ndim")
"""Attributes of a tensor that are printed without its values."""


def code_warnings(loss: Callable[..., object], model: nn.Module) -> Iterator[str]:
    """A line for each call in the bodies of a task's `loss` and of its own modules' `forward`."""
    forwards = {type(module).forward: None for module in model.modules()}
    for method, name in [(loss, "the loss"), *((f, f.__qualname__) for f in forwards)]:
        for place, call in _calls(method):
            if call.strip(".()") in OF_THE_LOOP:
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
    if isinstance(node.func, ast.Attribute) and node.func.attr in (*READS, *OF_THE_LOOP):
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
