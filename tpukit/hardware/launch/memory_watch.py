"""Ends a process that computes on the CPU before the system runs out of memory and kills one.

The kernel chooses whom it kills. So a process may by default take what the machine has available,
less a reserve: a thread looks at it, and sets the limit on private memory (RLIMIT_DATA)
accordingly, whoever took the rest. An allocation beyond it fails, and the process ends with an
error of its own. Where memory goes on shrinking (other processes, DataLoader workers, a system
without the limit), the thread raises the error in the main thread, and ends the process at last.

XLA does not recover from an allocation that fails (other devices wait for the one that failed, and
abort): there is no limit around it, and its process is ended earlier. The TPU compiler's is watched
from outside: native code takes no exception, and where libtpu writes a program out it holds the
interpreter's lock for minutes, in which no thread beside it looks.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tpukit.errors import OutOfMemoryError, TpukitError
from tpukit.hardware.launch.child import Child
from tpukit.hardware.memory import (
    available_bytes,
    data_bytes,
    host_memory_bytes,
    is_out_of_memory,
    private_bytes,
    reserve_bytes,
    tree_bytes,
)
from tpukit.io.units import format_bytes

FASTEST_BYTES_PER_SECOND = 16 * 2**30
"""Rate at which a process may use up memory; it decides when the thread looks again."""
LOOK_SECONDS = 0.01, 0.5
"""Least and most time between two looks."""
ASKED = re.compile(r"tried to allocate (\d+) bytes")
RAISE_SHARE, END_SHARE = 0.5, 0.25
"""Parts of the reserve: with less available the error is raised, and the process ended; twice as
much without a limit."""
HINT = (
    "Use a smaller batch (--accumulate) or model, or close other programs; `tpukit probe-batch` "
    "finds what fits. --memory-limit SIZE sets a limit of your own instead."
)


@contextmanager
def watched_memory(*, limited: bool = True) -> Iterator[None]:
    """Within the context this process leaves a reserve of the machine's memory free.

    limited: whether allocations beyond it fail.

    Raises:
        OutOfMemoryError: it needed more.
    """
    watch = MemoryWatch(limited=limited)
    try:
        with watch:
            yield
    except TpukitError:
        raise
    except Exception as error:
        if not is_out_of_memory(error, limited=True):
            raise
        raised = watch.error(str(error))
        for note in getattr(error, "__notes__", []):
            raised.add_note(note)
        raise raised from error


@contextmanager
def half_of_free_memory() -> Iterator[None]:
    """Within the context allocations that add up to more than half of the machine's free memory,
    less the reserve, fail (MemoryError from Python's own, std::bad_alloc from others)."""
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    _limit_data(data_bytes() + max(0, available_bytes() - reserve_bytes()) // 2, limits)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)


def _limit_data(limit: int, limits: tuple[int, int]) -> None:
    """Limits private memory, below the limits that the process was started with."""
    ceilings = [value for value in limits if value != resource.RLIM_INFINITY]
    # A system without such a limit is left to the looks.
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_DATA, (min([limit, *ceilings]), limits[1]))


def end_before_memory_does(child: Child) -> None:
    """Ends a child while the reserve, and the pages of its libraries, are still free; returns when
    the child has ended. Its output then ends as that of a process that `MemoryWatch` ends."""
    import psutil

    reserve, seconds = reserve_bytes(), 0.0
    with suppress(OSError):  # If the kernel kills a process all the same, then this one.
        Path(f"/proc/{child.pid}/oom_score_adj").write_text("1000")
    with suppress(psutil.Error, ValueError):  # It ends, or its output is closed, meanwhile.
        process = psutil.Process(child.pid)
        while not child.has_ended:
            time.sleep(seconds)
            memory, available = process.memory_info(), available_bytes()
            left = available - reserve - memory.shared
            if left < 0 and memory.rss >= reserve:
                sizes = (available, host_memory_bytes(), reserve, memory.rss)
                free, total, kept, held = map(format_bytes, sizes)
                child.end(f"Error: out of memory: {free} of {total} are available, {kept} of which "
                          f"stay free for the system, and the process holds {held}.")  # fmt: skip
            seconds = min(max(left / FASTEST_BYTES_PER_SECOND, LOOK_SECONDS[0]), LOOK_SECONDS[1])


class MemoryWatch:
    """The thread that looks, and what it does; see the module."""

    def __init__(self, *, limited: bool = True) -> None:
        self.limited = limited
        self.reserve = reserve_bytes()
        self.ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        """Processes of this run on the machine: all may allocate between two looks."""
        self.unused = data_bytes() - private_bytes()
        """Mapped and not used before, stacks and tables: no tensor waits there."""
        self.limits = resource.getrlimit(resource.RLIMIT_DATA)
        self.watched = threading.get_ident()
        self._raised = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory-watch", daemon=True)

    def __enter__(self) -> MemoryWatch:
        # Under the limit it might find no memory to begin, and this thread waits for that.
        self._thread.start()
        self.look()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        resource.setrlimit(resource.RLIMIT_DATA, self.limits)

    def error(self, cause: str = "") -> OutOfMemoryError:
        """What ends this process: how much memory there is, and what it needed."""
        asked = ASKED.search(cause)
        needed = f"; it asked for {format_bytes(int(asked[1]))} more" if asked else ""
        sizes = (available_bytes(), host_memory_bytes(), self.reserve, tree_bytes())
        available, total, reserve, held = map(format_bytes, sizes)
        return OutOfMemoryError(
            f"out of memory: {available} of {total} are available, {reserve} of which stay free for"
            f" the system, and this process and its children hold {held}{needed}.",
            HINT,
        )

    def look(self) -> float:
        """Sets the limit by what is available, or ends the process; seconds until the next look."""
        available = available_bytes()
        left = max(0, available - self.reserve)
        share = available / self.reserve / (1 if self.limited else 2)
        # What is small is not the cause, and its end would not help. This look takes memory itself:
        # the limit comes after it.
        if share < RAISE_SHARE and tree_bytes() >= self.reserve:
            self._end(at_once=share < END_SHARE)
        if self.limited:
            _limit_data(private_bytes() + self.unused + left // self.ranks, self.limits)
        least, most = LOOK_SECONDS
        return min(max(left / FASTEST_BYTES_PER_SECOND, least), most)

    def _watch(self) -> None:
        seconds = LOOK_SECONDS[0]
        while not self._ended.wait(seconds):
            with suppress(MemoryError):  # at the limit: the next look may find room
                seconds = self.look()

    def _end(self, *, at_once: bool) -> None:
        if at_once:
            print(f"Error: {self.error()}", file=sys.stderr, flush=True)
            os._exit(OutOfMemoryError.exit_code)
        if not self._raised:
            self._raised = True
            thread, kind = ctypes.c_ulong(self.watched), ctypes.py_object(MemoryError)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, kind)
