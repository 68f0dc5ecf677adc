"""What a run's time goes into: steps, waiting for data, stalls, compilations."""

import statistics
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

from tpukit.hardware.backend import Backend, Batch
from tpukit.io.units import format_duration


class StepClock:
    """Training time, without pauses and the first step's compilation."""

    def __init__(self, samples_per_step: int) -> None:
        self.samples_per_step = samples_per_step
        self.rate = 0.0
        """Samples per second of the last window."""
        self.waiting = 0.0
        """Part of the last window's time that the host waited for data."""
        self.busy = 0.0
        """Part of the last window's time in which this thread computed, other than data."""
        self._seconds = self._waited = 0.0
        self._steps = 0
        self.restart()

    def restart(self) -> None:
        """Begins a window, without what has not been counted yet."""
        self._window_started, self._window_computed = time.monotonic(), time.thread_time()
        self._window_steps = 0
        self._window_waited = 0.0

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        started, computed = time.monotonic(), time.thread_time()
        try:
            yield
        finally:
            self._window_waited += time.monotonic() - started
            self._window_computed += time.thread_time() - computed

    def step(self) -> None:
        """Counts a step."""
        self._window_steps += 1

    def stop(self) -> float:
        """Counts the window, and returns its seconds; a new one begins with `restart`."""
        seconds = time.monotonic() - self._window_started
        if not self._window_steps or seconds <= 0:
            return 0.0
        self.rate = self._window_steps * self.samples_per_step / seconds
        self.waiting = self._window_waited / seconds
        self.busy = (time.thread_time() - self._window_computed) / seconds
        self._seconds += seconds
        self._waited += self._window_waited
        self._steps += self._window_steps
        return seconds

    def mean_rate(self) -> float:
        """Samples per second over all windows."""
        return self._steps * self.samples_per_step / self._seconds if self._seconds else 0.0

    def mean_waiting(self) -> float:
        """Part of all windows' time that the host waited for data."""
        return self._waited / self._seconds if self._seconds else 0.0


@dataclass
class Goodput:
    """The share of a run's time that made steps which it kept, over all its sessions: pauses
    between them are left out, and of a session that was killed what came after its last log
    line."""

    kept_before: float = 0.0
    """Seconds of earlier sessions that made steps before the present one."""
    elapsed_before: float = 0.0
    """Seconds of earlier sessions."""
    began: float = field(default_factory=time.monotonic)
    kept_now: float = 0.0

    @classmethod
    def after(cls, rows: Iterable[Mapping[str, Any]], step: int, began: float) -> "Goodput":
        """That of a run which goes on after `step`, by its log lines; those behind are lost."""
        rows = list(rows)
        return cls(
            sum(float(row.get("step_seconds", 0.0)) for row in rows if row["step"] <= step),
            max((float(row.get("elapsed_seconds", 0.0)) for row in rows), default=0.0),
            began,
        )

    def fields(self, step_seconds: float) -> dict[str, float]:
        """Of a log line, whose steps took `step_seconds`."""
        self.kept_now += step_seconds
        return {
            "step_seconds": step_seconds,
            "elapsed_seconds": self.elapsed_seconds,
            "goodput": self.share,
        }

    @property
    def elapsed_seconds(self) -> float:
        """Seconds of all sessions until now."""
        return self.elapsed_before + time.monotonic() - self.began

    @property
    def share(self) -> float:
        """Part of them that made steps which are kept."""
        return min(1.0, (self.kept_before + self.kept_now) / max(self.elapsed_seconds, 1e-9))


# -- stalls ----------------------------------------------------------------------------------------
SHORTEST_STALL_SECONDS = 120.0
"""Minimum time without a step that is reported."""
STALL_FACTOR = 10.0
"""Minimum time without a step that is reported, in median steps."""
STEPS_FOR_MEDIAN = 50
CHECK_SECONDS = 5.0
SHOWN_FRAMES = 4
"""Number of frames in the line for people; the log has them all."""


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

    def __exit__(self, *_: object) -> None:
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


# -- compilations ----------------------------------------------------------------------------------
class CompilationWatch:
    """Counts compilations after the warm-up, which should not happen.

    An activity (training on one set of shapes, evaluating, reading) may compile the first time
    it is seen; whatever it compiles later is counted as after the warm-up.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.seen: set[Any] = set()
        self.counted = backend.compilations()
        self.graphs: dict[str, int] = {"start": self.counted}
        """Compilations by kind of activity."""
        self.after_warmup = 0

    def done(self, kind: str, shapes: Any = None) -> int:
        """Counts the compilations since the last call; returns how many were unexpected."""
        now = self.backend.compilations()
        fresh, self.counted = now - self.counted, now
        if fresh:
            self.graphs[kind] = self.graphs.get(kind, 0) + fresh
        if (kind, shapes) not in self.seen:
            self.seen.add((kind, shapes))
            return 0
        self.after_warmup += fresh
        return fresh


def shapes_of(batches: Iterable[Batch]) -> tuple[Any, ...]:
    """What a compiled graph depends on."""
    return tuple(tuple(tensor.shape) for batch in batches for tensor in batch.values())
