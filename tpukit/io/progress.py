"""Progress of long work on standard error: a bar on a terminal, plain lines elsewhere.

A notebook's cell is not a terminal, though its output is: it keeps every bar that was drawn.
"""

import sys
import time
from collections.abc import Callable
from typing import IO, Any, Self

from tpukit.io.notebook import in_notebook
from tpukit.io.units import format_duration

PLAIN_SECONDS = 10.0
"""Maximum pause in seconds at first, without a terminal."""
NEWS_SECONDS = 2.0
"""Minimum pause in seconds without a terminal, when there are new metrics."""
LIVE_SECONDS = 0.2
FIRST_MESSAGES = 10
"""Number of recurring lines (of validations, say) that are all shown."""
EVENLY_SPREAD = 80
"""Number of lines for work of known length."""
GROWTH = 0.12
"""Minimum pause after these lines, as a part of the time so far: 90 more lines in a year."""

MESSAGE_GROWTH = 0.25
"""Minimum pause between recurring lines, likewise: 40 lines in nine hours."""


class Thinning:
    """Decides which lines of a long run are printed: the first at once, then ever fewer."""

    def __init__(self, growth: float = GROWTH) -> None:
        self.growth = growth
        self._started = self._last = time.monotonic()
        self._shown = 0

    def is_due(self, pause: float, seconds_left: float | None = None) -> bool:
        """Whether to print now; `pause`: the shortest time between lines, in seconds."""
        now = time.monotonic()
        longest = self.growth * (now - self._started)
        if seconds_left is not None and self._shown < EVENLY_SPREAD:
            longest = min(longest, seconds_left / (EVENLY_SPREAD - self._shown))
        if now - self._last < max(pause, longest):
            return False
        self._last, self._shown = now, self._shown + 1
        return True


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
        self._started = self._drawn = time.monotonic()
        self._lines, self._messages = Thinning(), Thinning(MESSAGE_GROWTH)
        self._announced = 0
        self._ended = self._fresh = False
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

    def skip(self, items: int) -> None:
        """`items` are done already, by an earlier run; they do not count for the rate."""
        self.done += items
        self._first += items

    def restart(self, done: int) -> None:
        """Takes rate and time left from here on: the first `done` items took longer than others."""
        self.done = self._first = done
        self._started, self._lines = time.monotonic(), Thinning()

    def advance(self, items: int = 1) -> None:
        """`items` more are done."""
        self.update(self.done + items)

    def update(
        self, done: int, detail: Callable[[], str] | None = None, *, news: bool = False
    ) -> None:
        """`done` items so far; `detail` is called only when a line or the bar is drawn.

        A plain line has the detail where there were news since the last one, else the rate alone.
        """
        self.done = done
        self._fresh |= news
        if not self.enabled:
            return
        if self._bar is not None:
            self._draw(done, detail)
            return
        is_last = detail is not None and done == self.total
        is_due = self._lines.is_due(NEWS_SECONDS if news else PLAIN_SECONDS, self._seconds_left())
        if (is_due or is_last) and not self._ended:
            self._ended = is_last
            text = detail() if detail and (self._fresh or is_last) else self._rate()
            self._fresh = False
            print(self._line(text), file=self.stream, flush=True)

    def _draw(self, done: int, detail: Callable[[], str] | None) -> None:
        now = time.monotonic()
        if now - self._drawn >= LIVE_SECONDS or done == self.total:
            self._drawn = now
            text = detail() if detail else self._rate()
            self._bar.update(self._task, completed=done, detail=text)

    def admits(self) -> bool:
        """Whether one more recurring line for people may stand among the progress lines.

        All of them above a bar; where every line is kept, all at first, and then ever fewer.
        """
        self._announced += 1
        return (
            self._bar is not None
            or self._announced <= FIRST_MESSAGES
            or self._messages.is_due(NEWS_SECONDS)
        )

    def message(self, text: str) -> None:
        """A line for people, above the bar."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=self.stream, flush=True)

    def _line(self, detail: str) -> str:
        if self.total is None:
            return f"{self.label} {self.done}  {detail}"
        seconds = self._seconds_left()
        left = "?" if seconds is None else format_duration(seconds)
        return f"{self.label} {self.done}/{self.total}  {detail}  left {left}"

    def _rate(self) -> str:
        rate = (self.done - self._first) / max(time.monotonic() - self._started, 1e-9)
        return f"{rate:,.3g}/s" if rate >= 0.1 or not rate else f"{1 / rate:,.3g} s each"

    def _seconds_left(self) -> float | None:
        """From the mean rate of this session."""
        if self.total is None or self.done <= self._first:
            return None
        seconds = (time.monotonic() - self._started) / (self.done - self._first)
        return seconds * (self.total - self.done)


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
