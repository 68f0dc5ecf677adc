"""Scans files and folders for findings; a file that cannot be read becomes a note."""

import gc
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from pathlib import Path

from tpukit.errors import DataError
from tpukit.io.process import allowed_cores
from tpukit.io.workers import worker_pool
from tpukit.knowledge.calls import call_table, move_table
from tpukit.probe.lint.call_finder import find_calls
from tpukit.probe.lint.finding import Finding
from tpukit.probe.lint.names import Names
from tpukit.probe.lint.prefilter import may_concern
from tpukit.probe.lint.rules import find_by_rules
from tpukit.probe.lint.source import Module, decode_source, read_bytes, source_modules
from tpukit.probe.lint.syntax import forget

_IGNORE = re.compile(r"tpukit: ignore(?:\[([^]]*)\])?")
_SKIPPED_FOLDERS = {
    ".git", ".hg", ".svn", "__pycache__", ".venv", "venv", "node_modules", ".ipynb_checkpoints",
    ".mypy_cache", ".ruff_cache", ".pytest_cache", ".tox", ".nox", ".eggs",
}  # fmt: skip
_SUFFIXES = (".py", ".ipynb", ".pyi")
_IN_A_TEXT = "not fixed: inside a string literal"
_FILES_FOR_WORKERS = 1500
"""Minimum number of files for worker processes, which take longer to start than they save below."""
_NAMED_FILES = 20
"""Maximum number of named files that are parsed in any case, to report invalid ones."""


@dataclass
class ScanResult:
    """The findings of a scan, and notes on files that could not be read."""

    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    files: int = 0


def scan_paths(paths: Sequence[str], *, moves: str = "") -> ScanResult:
    """Scans files, and the Python files and notebooks in folders.

    moves: for what the code needs to move instead: from torch_xla to `torch_tpu`, or from CUDA to
        `tpu`.

    Raises DataError where a path does not exist, or the only file that is named cannot be read.
    """
    report = ScanResult()
    named = [Path(path) for path in paths]
    for path in named:
        if not path.exists():
            raise DataError(f"{path}: no such file or folder", "Check the path.")
    files = list(dict.fromkeys(file for path in named for file in source_files(path)))
    asked_for = {str(path) for path in named}
    for found, notes in _scan_all([str(file) for file in files], asked_for, moves):
        report.findings += found
        report.notes += notes
    # A note on a whole file starts with its path; one on a cell names that too.
    unread = [note for note in report.notes if note.startswith(f"{named[0]}: ")] if named else []
    if len(files) == 1 and unread and not named[0].is_dir():
        raise DataError(unread[0], "Python 3 files and Jupyter notebooks can be scanned.")
    report.findings.sort(key=lambda f: (f.path, f.cell or 0, f.line, f.column))
    report.files = len(files)
    return report


def source_files(path: Path) -> Iterator[Path]:
    """A file itself; for a folder its Python files and notebooks, in order."""
    if not path.is_dir():
        yield path
        return
    for folder, inner, names in os.walk(path):
        inner[:] = sorted(name for name in inner if name not in _SKIPPED_FOLDERS)
        for name in sorted(names):
            if name.endswith(_SUFFIXES):
                yield Path(folder) / name


def _scan_all(
    files: list[str], asked_for: set[str], moves: str
) -> Iterable[tuple[list[Finding], list[str]]]:
    workers = min(allowed_cores(), 8)
    whole = [file in asked_for and len(asked_for) < _NAMED_FILES for file in files]
    if len(files) < _FILES_FOR_WORKERS or workers == 1:
        return map(scan_file, files, whole, repeat(moves))
    with worker_pool(workers) as pool:
        return list(pool.map(scan_file, files, whole, repeat(moves), chunksize=32))


def scan_file(path: str, whole: bool = False, moves: str = "") -> tuple[list[Finding], list[str]]:
    """The findings of one file, and notes on what could not be read in it.

    whole: parse it even where the prefilter rules out a finding.
    """
    enabled = gc.isenabled()
    try:
        data = read_bytes(Path(path))
        if not whole and not may_concern(data, moves=moves):
            return [], []
        gc.disable()  # garbage collection takes two thirds of the parsing time
        modules = source_modules(path, decode_source(data)[0])
        found = [finding for module in modules for finding in module_findings(module, moves=moves)]
        return found, [note for module in modules for note in module.notes]
    except DataError as error:
        return [], [error.message]
    finally:
        if enabled:
            gc.enable()


def module_findings(module: Module, *, moves: str = "") -> list[Finding]:
    """One module's findings in terms of files and cells."""
    return [_in_file(place, module) for place in places_of(module, moves=moves)]


def _in_file(place: Finding, module: Module) -> Finding:
    cell, line, column = module.place(place.line, place.column)
    if place.fixable and module.embedded:
        place = replace(place, fix=None, remark=_IN_A_TEXT)
    return replace(place, path=module.path, cell=cell, line=line, column=column, node=None)


def places_of(module: Module, *, moves: str = "") -> list[Finding]:
    """Everything found in a module, in order; nothing in one that does not parse."""
    if module.tree is None:
        return []
    try:
        names = Names(module.tree)
        places = find_calls(module, names, move_table(moves) if moves else call_table())
        known = {(place.line, place.column) for place in places} if moves else set()
        rules = find_by_rules(module, names, to_xla=moves == "tpu") if moves != "torch_tpu" else []
        places += [place for place in rules if (place.line, place.column) not in known]
    except RecursionError:
        module.notes.append(f"{module.path}: nested too deeply: skipped")
        return []
    finally:
        forget(module.tree)
    places.sort(key=lambda place: (place.line, place.column))
    return [place for place in places if not _is_ignored(place, module.lines)]


def _is_ignored(place: Finding, lines: Sequence[str]) -> bool:
    """Whether a comment on its first or last line suppresses it, or what its `[id, ...]` names."""
    here = (lines[line - 1] for line in {place.line, place.end_line} if line <= len(lines))
    found = [match for match in map(_IGNORE.search, here) if match]
    return any(match[1] is None or place.id in re.split(r"[,\s]+", match[1]) for match in found)
