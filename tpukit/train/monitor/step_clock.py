"""How fast a run trains, how long it waits for data, and when a step hangs."""

from __future__ import annotations

import statistics
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from tpukit.io.units import format_duration

SHORTEST_STALL_SECONDS = 120.0
"""Minimum time without a step that is reported."""
STALL_FACTOR = 10.0
"""Minimum time without a step that is reported, in median steps."""
STEPS_FOR_MEDIAN = 50
CHECK_SECONDS = 5.0
SHOWN_FRAMES = 4
"""Number of frames in the line for people; the log has them all."""


class StepClock:
    """Training time, without pauses and the first step's compilation."""

    def __init__(self, samples_per_step: int) -> None:
        self.samples_per_step = samples_per_step
        self.rate = 0.0
        """Samples per second of the last window."""
        self.waiting = 0.0
        """Part of the last window's time that the host waited for data."""
        self._seconds = self._waited = 0.0
        self._steps = 0
        self.restart()

    def restart(self) -> None:
        """Begins a window, without what has not been counted yet."""
        self._window_started = time.monotonic()
        self._window_steps = 0
        self._window_waited = 0.0

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self._window_waited += time.monotonic() - started

    def step(self) -> None:
        """Counts a step."""
        self._window_steps += 1

    def stop(self) -> None:
        """Counts the window; a new one begins with `restart`."""
        seconds = time.monotonic() - self._window_started
        if not self._window_steps or seconds <= 0:
            return
        self.rate = self._window_steps * self.samples_per_step / seconds
        self.waiting = self._window_waited / seconds
        self._seconds += seconds
        self._waited += self._window_waited
        self._steps += self._window_steps

    def mean_rate(self) -> float:
        """Samples per second over all windows."""
        return self._steps * self.samples_per_step / self._seconds if self._seconds else 0.0

    def mean_waiting(self) -> float:
        """Part of all windows' time that the host waited for data."""
        return self._waited / self._seconds if self._seconds else 0.0


class StallWatch:
    """Reports, once, where the main thread is when no step has ended for long.

    report: takes a line for people and the whole stack. Use as a context manager in the thread
    that trains; `step` after each step, `pause` around other work.
    """

    def __init__(self, rank: int, report: Callable[[str, str], None]) -> None:
        self.rank = rank
        self.report = report
        self._thread_id = threading.get_ident()
        self._durations: deque[float] = deque(maxlen=STEPS_FOR_MEDIAN)
        self._since: float | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stall-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._ended.set()
        self._thread.join()

    def step(self) -> None:
        """A step has ended; the next one begins."""
        now = time.monotonic()
        if self._since is not None:
            self._durations.append(now - self._since)
        self._since = now

    def pause(self) -> None:
        """What follows (validation, saving, a compilation) is not watched."""
        self._since = None

    def resume(self) -> None:
        """A step begins after a pause."""
        self._since = time.monotonic()

    def _watch(self) -> None:
        while not self._ended.wait(min(CHECK_SECONDS, SHORTEST_STALL_SECONDS / 2)):
            since, durations = self._since, [*self._durations]
            if since is None or not durations:
                continue
            median = statistics.median(durations)
            seconds = time.monotonic() - since
            if seconds > max(SHORTEST_STALL_SECONDS, STALL_FACTOR * median):
                self._report(seconds, median)
                return

    def _report(self, seconds: float, median: float) -> None:
        frame = sys._current_frames().get(self._thread_id)
        stack = traceback.extract_stack(frame)
        where = " < ".join(
            f"{f.name} ({f.filename}:{f.lineno})" for f in stack[: -SHOWN_FRAMES - 1 : -1]
        )
        self.report(
            f"Warning: no step for {format_duration(seconds)}, one takes {format_duration(median)}:"
            f" rank {self.rank} is in {where}. The run goes on waiting.",
            "".join(traceback.format_list(stack)),
        )
