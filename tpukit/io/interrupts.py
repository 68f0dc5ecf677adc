"""Requests to stop a run: signals and the time limit."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

STOPPING = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """A request to stop, by a signal or the clock; the engine checks it between steps.

    `deadline` is a `time.monotonic()` stamp. A second signal raises KeyboardInterrupt.
    """

    def __init__(self, deadline: float | None = None) -> None:
        self.deadline = deadline
        self.signal_number: int | None = None

    @property
    def out_of_time(self) -> bool:
        return self.deadline is not None and time.monotonic() >= self.deadline

    @property
    def is_set(self) -> bool:
        return self.signal_number is not None or self.out_of_time

    def handle(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        if self.signal_number is not None:
            raise KeyboardInterrupt
        self.signal_number = number


@contextmanager
def listening(stop: StopRequest) -> Iterator[StopRequest]:
    """Installs the handlers for the context and restores the previous ones.

    Python gives signals to the main thread alone: in another one there is nothing to install.
    """
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    former: dict[signal.Signals, Any] = {n: signal.getsignal(n) for n in STOPPING}
    for number in STOPPING:
        signal.signal(number, stop.handle)
    try:
        yield stop
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
