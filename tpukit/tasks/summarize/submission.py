"""The file that `predict` writes: whole or not at all, and checked against a sample."""

import os
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from tpukit.errors import DataError, UsageError
from tpukit.tasks.summarize.data.csv_file import DIALOGUES, Columns, read_rows, write_table


def require_writable(out: Path) -> None:
    """Raises `UsageError` before any work where `out` could not be written at its end."""
    folder = out.parent
    if not folder.is_dir():
        raise UsageError(
            f"--out {out}: there is no folder {folder}.",
            f"Make it first: mkdir -p {shlex.quote(str(folder))}",
        )
    if out.is_dir():
        raise UsageError(f"--out {out} is a folder.", "Name a file, such as submission.csv.")
    try:
        probe = folder / f".{out.name}.{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(
            f"--out {out}: the folder {folder} cannot be written: {error.strerror}.",
            "Name a file in a folder you can write to.",
        ) from error


def write_rows(path: Path, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Writes a CSV file atomically. Raises `UsageError` where that is not possible."""
    try:
        write_table(path, columns, rows)
    except OSError as error:
        raise UsageError(
            f"Cannot write {path}: {error.strerror}.", "Make room, or name another file."
        ) from error


def check_against_sample(ids: Sequence[str], sample: Path, columns: Columns = DIALOGUES) -> None:
    """Raises `DataError` where a sample submission has other ids."""
    rows = read_rows(sample, summaries=True, dialogues=False, blank=True, columns=columns)
    expected = [row.id for row in rows]
    missing = sorted(set(expected) - set(ids))
    extra = sorted(set(ids) - set(expected))
    if missing or extra:
        first = f"lacks {missing[0]!r}" if missing else f"has {extra[0]!r}, which it does not"
        raise DataError(
            f"The test file {first} of {sample} ({len(missing)} missing, {len(extra)} too many).",
            "Give the test file that belongs to the sample submission.",
        )
