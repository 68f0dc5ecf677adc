"""A file with the end of a command's output, each line with the time at which it came."""

from __future__ import annotations

import re
import shutil
import time
from collections import defaultdict
from pathlib import Path

MOST_BYTES = 16 << 20
"""Maximum bytes of the log; what came before them is dropped."""
_LONGEST_BEGUN = 1 << 16
"""Bytes of a line without an end that are kept in memory."""
_OVERWRITTEN = re.compile(rb"[^\n\r]*\r(?=[^\n\r])")
"""What a progress bar draws over."""


class OutputLog:
    """Receives the output of several streams, in which lines may come in pieces."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._older = path.with_name(f"{path.name}.older")
        self._file = path.open("wb")
        self._size = 0
        self._begun: dict[int, bytes] = defaultdict(bytes)

    def add(self, stream: int, data: bytes) -> None:
        """Adds output of one stream; a line is written when it ends."""
        begun = self._begun[stream]
        lines, newline, rest = (begun + data if begun else data).rpartition(b"\n")
        if len(rest) > _LONGEST_BEGUN:
            lines, newline, rest = lines + newline + rest, b"\n", b""
        if newline:
            self._write(lines)
        self._begun[stream] = _OVERWRITTEN.sub(b"", rest) if b"\r" in rest else rest

    def note(self, text: str) -> None:
        """Adds a line of tpukit's own, after what the streams have begun."""
        self._end_lines()
        self._write(f"tpukit run: {text}".encode())
        self.flush()

    def flush(self) -> None:
        """Writes to the file what has come, but for lines without an end."""
        self._file.flush()

    def close(self) -> None:
        """Writes everything, in one file."""
        self._end_lines()
        self._file.close()
        if self._older.exists():
            with self._older.open("ab") as whole, self.path.open("rb") as newest:
                shutil.copyfileobj(newest, whole)
            self._older.replace(self.path)

    def _end_lines(self) -> None:
        for rest in self._begun.values():
            if rest.strip():
                self._write(rest)
        self._begun.clear()

    def _write(self, lines: bytes) -> None:
        if b"\r" in lines:
            lines = _OVERWRITTEN.sub(b"", lines)
        now = time.time()
        whole = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
        stamp = f"{whole}.{int(now % 1 * 1000):03d} ".encode()
        self._size += self._file.write(stamp + lines.replace(b"\n", b"\n" + stamp) + b"\n")
        if self._size > MOST_BYTES // 2:
            self._file.close()
            self.path.replace(self._older)
            self._file, self._size = self.path.open("wb"), 0
