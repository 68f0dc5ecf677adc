"""Progress of long work on standard error: a bar on a terminal, plain lines elsewhere.

A notebook's cell is not a terminal, though its output is: it keeps every bar that was drawn.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import IO, Any, Self

from tpukit.io.notebook import in_notebook
from tpukit.io.units import format_duration

PLAIN_SECONDS = 10.0
"""Longest silence where there is no terminal."""
NEWS_SECONDS = 2.0
"""Shortest pause there, when new metrics were read."""
LIVE_SECONDS = 0.2


class Progress:
    """Counts `total` items (None: unknown); use it as a context manager.

    done: items that an earlier run completed; they do not count for the rate.
    """

    def __init__(
        self,
        label: str,
        total: int | None = None,
        *,
        done: int = 0,
        enabled: bool = True,
        stream: IO[str] | None = None,
    ) -> None:
        self.label = label
        self.total = total
        self.done = done
        self.enabled = enabled
        self.stream = stream or sys.stderr
        self._first = done
        self._started = self._shown = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> Self:
        if self.enabled and self.stream.isatty() and not in_notebook():
            self._bar = _rich_bar(self.stream)
            self._bar.start()
            self._task = self._bar.add_task(
                self.label, total=self.total, completed=self.done, detail=""
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done)
            self._bar.stop()

    def advance(self, items: int = 1) -> None:
        """`items` more are done."""
        self.update(self.done + items)

    def update(
        self, done: int, detail: Callable[[], str] | None = None, *, news: bool = False
    ) -> None:
        """`done` items so far; `detail` is called only when a line or the bar is drawn."""
        self.done = done
        if not self.enabled:
            return
        now = time.monotonic()
        pause = LIVE_SECONDS if self._bar else NEWS_SECONDS if news else PLAIN_SECONDS
        finished = detail is not None and done == self.total
        if now - self._shown < pause and not finished:
            return
        self._shown = now
        text = detail() if detail else self._rate()
        if self._bar is not None:
            self._bar.update(self._task, completed=done, detail=text)
        else:
            print(self._line(text), file=self.stream, flush=True)

    def message(self, text: str) -> None:
        """A line for people, above the bar."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=self.stream, flush=True)

    def _line(self, detail: str) -> str:
        if self.total is None:
            return f"{self.label} {self.done}  {detail}"
        return f"{self.label} {self.done}/{self.total}  {detail}  left {self._time_left()}"

    def _rate(self) -> str:
        rate = (self.done - self._first) / max(time.monotonic() - self._started, 1e-9)
        return f"{rate:,.3g}/s"

    def _time_left(self) -> str:
        """From the mean rate of this session."""
        if self.total is None or self.done <= self._first:
            return "?"
        seconds = (time.monotonic() - self._started) / (self.done - self._first)
        return format_duration(seconds * (self.total - self.done))


def _rich_bar(stream: IO[str]) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    return RichProgress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[detail]}", markup=False),
        TimeRemainingColumn(),
        console=Console(file=stream),
    )
