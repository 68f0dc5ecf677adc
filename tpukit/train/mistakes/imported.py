"""Importing a Python file or module of the user's."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from tpukit.errors import ConfigError, TpukitError
from tpukit.train.mistakes.raised import cause_line, task_failure

USER_MODULE = "tpukit_user_"
"""What the names of such modules begin with."""
_importing: set[str] = set()
_folders: dict[str, frozenset[str]] = {}
"""The folders of the user's files, and the modules that were there before each."""


def import_user_file(path: Path, option: str) -> ModuleType:
    """The module of a file that an option names. Raises ConfigError where it cannot be imported."""
    refuse_while_importing()
    if not path.is_file():
        raise ConfigError(f"{option}: there is no file {path}.", "Check the path before the colon.")
    module_name = f"{USER_MODULE}{option.strip('-')}_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # DataLoader workers find a class again by its module's name.
    sys.modules[module_name] = module
    import_from(path.resolve().parent)
    with _failure_named(str(path), option, f"`python {path}` shows the whole traceback."):
        spec.loader.exec_module(module)
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
    _folders.setdefault(place, frozenset(sys.modules))
    if StandardLibraryFirst not in map(type, sys.meta_path):
        sys.meta_path.insert(0, StandardLibraryFirst())


def _forget_namesakes(folder: str) -> None:
    """Drops what another of these folders gave under a name that this one has too (`model`)."""
    own = {path.stem for path in Path(folder).glob("*") if path.suffix == ".py" or path.is_dir()}
    for other, before in _folders.items():
        for name, module in [*sys.modules.items()]:
            file = getattr(module, "__file__", None) or ""
            is_others = file.startswith(other + os.sep) and not file.startswith(folder + os.sep)
            if is_others and name.partition(".")[0] in own and name not in before:
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
