"""How far a long job is: a bar on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Self

SECONDS_BETWEEN_LINES = 5.0


class Progress:
    """Counts `total` items on standard error; use it as a context manager."""

    def __init__(self, label: str, total: int, *, already: int = 0, silent: bool = False) -> None:
        self.label = label
        self.total = total
        self.silent = silent
        self.done = already
        self._already = already
        self._started = time.monotonic()
        self._line_due = self._started + SECONDS_BETWEEN_LINES
        self._bar: Any = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty() and not self.silent:
            self._bar = _rich_bar()
            self._bar.start()
            self._item = self._bar.add_task(self.label, total=self.total, completed=self.done)
        return self

    def advance(self, items: int) -> None:
        """`items` more are done."""
        self.done += items
        if self._bar is not None:
            self._bar.update(self._item, completed=self.done)
        elif time.monotonic() >= self._line_due and not self.silent:
            self._line_due = time.monotonic() + SECONDS_BETWEEN_LINES
            print(self.line(), file=sys.stderr, flush=True)

    def line(self) -> str:
        """`simulating 3,000 of 10,000 (520/s, 13 s left)`"""
        seconds = time.monotonic() - self._started
        rate = (self.done - self._already) / max(seconds, 1e-9)
        left = (self.total - self.done) / rate if rate else float("inf")
        return f"{self.label} {self.done:,} of {self.total:,} ({rate:.0f}/s, {duration(left)} left)"

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


def duration(seconds: float) -> str:
    """`13 s`, `4 min`, `2 h 05 min`"""
    if seconds == float("inf"):
        return "unknown time"
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"


def _rich_bar() -> Any:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as RichProgress

    return RichProgress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
