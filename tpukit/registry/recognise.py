"""Which installed task some data is for, and which runs are there, where a command names neither.

By what the tasks declare, read from their source: nothing of them is imported.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from tpukit.errors import DataError
from tpukit.io.tables import SUFFIXES, open_table, plain_name
from tpukit.registry.declared import ClassSource, find_source, registered

DEPTH, ENTRIES = 3, 1000
FOLDERS, FILES = 20, 50
"""Levels of a data folder that are looked at, names in each folder, and those taken of them."""
TABLE = "train"
"""Name of a table of training data, without its suffix, and how its folders begin."""
SET_ASIDE = ".old-"
"""Part of the name of a run that --no-resume has set aside."""


class Recognised(NamedTuple):
    """A task that data is for."""

    task: str
    reason: str
    """What it is recognised by."""


def recognised(path: Path) -> list[Recognised]:
    """The tasks that a data path looks like it is for."""
    files, found = [*_some_files(path)], []
    for name, source in _tasks():
        globs = source.member("data_files") or ()
        named = (str(f) for f in files if any(fnmatch(f.name.lower(), glob) for glob in globs))
        reason = next(named, None) or _by_columns(path, source)
        if reason is not None:
            found.append(Recognised(name, reason))
    return found


def data_needs() -> str:
    """What the data of each installed task is, for people."""
    needs = ((name, source.member("data_needs")) for name, source in _tasks())
    return "; ".join(f"{name}: {text}" for name, text in needs if text)


def registered_generators() -> list[str]:
    """The data sets that the installed tasks generate."""
    declared = (source.member("generators") for _, source in _tasks())
    return [name for generators in declared if isinstance(generators, dict) for name in generators]


def _tasks() -> Iterator[tuple[str, ClassSource]]:
    for name in registered():
        if (source := find_source(name)) is not None:
            yield name, source


def _some_files(root: Path, depth: int = DEPTH) -> Iterator[Path]:
    """Some of the files below a folder; a file's own path."""
    if root.is_file():
        yield root
        return
    with suppress(OSError), os.scandir(root) as entries:
        some = [entry for entry in islice(entries, ENTRIES) if not entry.name.startswith(".")]
        # A training part says best what is learned.
        some.sort(key=lambda entry: (not entry.name.lower().startswith(TABLE), entry.name))
        yield from [Path(entry.path) for entry in some if entry.is_file()][:FILES]
        folders = [entry.path for entry in some if entry.is_dir()][:FOLDERS]
        for folder in folders if depth > 1 else ():
            yield from _some_files(Path(folder), depth - 1)


def _by_columns(path: Path, source: ClassSource) -> str | None:
    """The table that has columns which a task declares, and these."""
    declared = source.member("data_columns") or ()
    tables = [path] if path.is_file() else [path / f"{TABLE}{suffix}" for suffix in SUFFIXES]
    for table in tables:
        if not table.is_file():
            continue
        with suppress(DataError):
            there = {plain_name(name).lower() for name in open_table(table).columns}
            for columns in declared:
                if there.issuperset(columns):
                    return f"the column{'s' * (len(columns) > 1)} {', '.join(columns)} of {table}"
    return None


# -- runs ----------------------------------------------------------------------------------------
def run_folder_of(task: str) -> Path | None:
    """The folder that a task's runs have by themselves; None where its source cannot be read."""
    source = find_source(task)
    if source is None:
        return None
    name = source.member("name") or (task if task in registered() else "")
    return Path(source.member("folder") or f"results/{name or source.definition.name.lower()}")


def runs_here() -> list[Path]:
    """The runs in the folders that runs have by themselves, the latest first."""
    declared = (run_folder_of(name) for name in registered())
    folders = {path for path in declared if path is not None} | {*Path("results").glob("*")}
    runs = [path for path in folders if is_run(path) and SET_ASIDE not in path.name]
    return sorted(runs, key=lambda path: (-(path / "config.toml").stat().st_mtime, path))


def is_run(path: Path) -> bool:
    """Whether a folder looks like a run's."""
    return (path / "config.toml").is_file() and (path / "checkpoints").is_dir()
