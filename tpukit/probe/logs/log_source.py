"""Reads a log from a file, a pipe or standard input in pieces, within a time limit.

A pipe that is never closed ends at the time limit; of a file that takes longer the end is read,
because that is where errors are.
"""

import codecs
import os
import select
import stat
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tpukit.errors import DataError

_PIECE_BYTES = 1 << 20
_TAIL_BYTES = 8 << 20
_KNOWN_BINARY = {
    b"\x1f\x8b": "a gzip archive", b"PK\x03\x04": "a zip archive (or a torch checkpoint)",
    b"\x7fELF": "a program", b"\x89PNG": "a picture", b"\xff\xd8\xff": "a picture",
    b"BZh": "a bzip2 archive", b"\xfd7zXZ": "an xz archive", b"\x28\xb5\x2f\xfd": "a zstd archive",
    b"%PDF": "a PDF", b"\x80\x02": "a pickle", b"\x80\x04": "a pickle",
    b"\x93NUMPY": "a NumPy array",
}  # fmt: skip
_TEXT_CONTROLS = frozenset(b"\t\n\r\x0b\x0c\x08\x07\x1b")
_CONTROLS = bytes(c for c in [*range(32), 127] if c not in _TEXT_CONTROLS)


@dataclass
class LogSource:
    """An open log. After reading, `notes` lists what was skipped and why."""

    name: str
    descriptor: int
    size: int | None
    """Bytes of a regular file; None for a pipe."""
    deadline: float
    """On `time.monotonic`'s clock."""
    notes: list[str] = field(default_factory=list)

    def pieces(self) -> Iterator[tuple[bytes, int]]:
        """The content in pieces, each with its offset; after the time limit the file's end."""
        offset = 0
        while True:
            if time.monotonic() > self.deadline:
                yield from self._tail(offset)
                return
            piece = self._read()
            if not piece:
                return
            yield piece, offset
            offset += len(piece)

    def close(self) -> None:
        """Closes the file; standard input stays open."""
        if self.descriptor != 0:
            os.close(self.descriptor)

    def _read(self) -> bytes:
        """The next bytes; empty at the end, or when a pipe stays silent until the time limit."""
        if self.size is None:
            left = max(self.deadline - time.monotonic(), 0.0)
            if not select.select([self.descriptor], [], [], left)[0]:
                self.notes.append("The input did not end within the time limit: read until then.")
                return b""
        try:
            return os.read(self.descriptor, _PIECE_BYTES)
        except BlockingIOError:
            return b""
        except OSError as error:
            raise DataError(
                f"{self.name}: cannot be read ({error.strerror})", "Name a text file or `-`."
            ) from None

    def _tail(self, offset: int) -> Iterator[tuple[bytes, int]]:
        if self.size is None:
            self.notes.append("The input did not end within the time limit: read until then.")
            return
        start = max(offset, self.size - _TAIL_BYTES)
        if start > offset:
            self.notes.append(
                f"{self.name} has {self.size / 2**30:.2f} GiB: within the time limit the first "
                f"{offset / 2**20:.0f} MiB and the last {_TAIL_BYTES >> 20} MiB were read; line "
                "numbers at the end are counted from there."
            )
        os.lseek(self.descriptor, start, os.SEEK_SET)
        while start < self.size and (piece := self._read()):
            yield piece, start
            start += len(piece)


def open_log(name: str, seconds: float) -> LogSource:
    """Opens a file, or standard input for `-`. Raises DataError where that cannot be read."""
    deadline = time.monotonic() + seconds
    if name == "-":
        if sys.stdin is None or sys.stdin.closed:
            raise DataError("standard input is closed", "Name a file, or pipe a log in.")
        return LogSource("standard input", 0, None, deadline)
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{name}: cannot be read ({reason})", "Name a log, or `-`.") from None
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISDIR(mode):
        os.close(descriptor)
        raise DataError(f"{name}: is a folder", _a_file_in(Path(name)))
    is_file = stat.S_ISREG(mode)
    size = os.fstat(descriptor).st_size if is_file else None
    return LogSource(name, descriptor, size or None, deadline)


def _a_file_in(folder: Path) -> str:
    logs = [path for pattern in ("*.txt", "*.log") for path in sorted(folder.glob(pattern))]
    return f"Name one file, {logs[0]} for instance." if logs else "Name one file in it."


def encoding_of(piece: bytes, name: str) -> str:
    """The encoding of a log, detected from its first piece.

    Raises DataError for a binary file.
    """
    if piece.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    for magic, what in _KNOWN_BINARY.items():
        if piece.startswith(magic):
            raise DataError(
                f"{name}: not a text file but {what}", "Name the log itself (unpacked)."
            )
    sample = piece[: 1 << 16]
    controls = len(sample) - len(sample.translate(None, _CONTROLS))
    if controls > 0.02 * len(sample) + 4:
        raise DataError(f"{name}: is a binary file", "Name a text file.")
    return "utf-8"
