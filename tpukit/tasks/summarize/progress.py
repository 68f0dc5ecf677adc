"""A progress line on standard error for long work on rows; nothing where nobody watches."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

SECONDS_BETWEEN_LINES = 0.5


class RowProgress:
    """Shows rows done and rows a second; on a terminal only, and only for work that takes long."""

    def __init__(self, title: str, total: int | None = None) -> None:
        self.title = title
        self.total = total
        self._started = time.monotonic()
        self._shown = self._started
        self._on_terminal = sys.stderr.isatty()
        self._dirty = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._dirty:
            print(file=sys.stderr)

    def update(self, done: int) -> None:
        """`done` rows so far."""
        now = time.monotonic()
        if not self._on_terminal or now - self._shown < SECONDS_BETWEEN_LINES:
            return
        self._shown, self._dirty = now, True
        of_total = f" of {self.total:,}" if self.total else ""
        rate = done / max(now - self._started, 1e-9)
        line = f"\r{self.title}: {done:,}{of_total} rows, {rate:,.0f} a second"
        print(line, end="", file=sys.stderr, flush=True)

    def tell(self, message: str) -> None:
        """A line for people."""
        if self._dirty:
            print(file=sys.stderr)
            self._dirty = False
        print(message, file=sys.stderr, flush=True)
