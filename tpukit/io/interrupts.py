"""Requests to stop a run: signals, output that nobody reads any more, and the time limit."""

import errno
import io
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, cast

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOPPED_CODES = tuple(128 + number for number in (*STOPPING, signal.SIGPIPE))
"""Exit codes of a run that was asked to stop."""
IMPATIENT_SECONDS = 3.0
"""Seconds in which a second SIGINT is ignored: a notebook's stop button sends two."""
SECONDS_TO_RAISE = 5.0
"""Time in seconds for the main thread to handle the second SIGINT."""
STUCK = "The run waits for a device or another rank; a second interrupt ends it as it is."


class StopRequest:
    """A request to stop, by a signal or the clock; the engine checks it between steps.

    `deadline` is a `time.monotonic()` stamp. While nothing would be lost (`raises`) a signal raises
    KeyboardInterrupt at once; so does a second SIGINT, but never while the run `is_saving`.
    """

    def __init__(self, deadline: float | None = None) -> None:
        self.deadline = deadline
        self.signal_number: int | None = None
        self.handled = 0
        """Number of signals so far."""
        self.raises = False
        self.is_saving = False
        self.on_request: Callable[[], object] = lambda: None
        """Called at the first signal."""
        self._requested_at = 0.0

    @property
    def is_set(self) -> bool:
        is_late = self.deadline is not None and time.monotonic() >= self.deadline
        return self.signal_number is not None or is_late

    def handle(self, number: int, frame: FrameType | None = None) -> None:
        """The signal handler; SIGPIPE stands for lost output."""
        now, is_first = time.monotonic(), self.signal_number is None
        self.handled += 1
        if is_first:
            self.signal_number, self._requested_at = number, now
            with suppress(OSError):
                self.on_request()
        if self.is_saving or threading.current_thread() is not threading.main_thread():
            return
        if self.raises or is_impatient(number, now - self._requested_at):
            raise KeyboardInterrupt
        if is_first:
            _say("Stopping after this step, with a checkpoint.")

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Lets a signal, also one that came before, raise KeyboardInterrupt within."""
        self.raises = True
        try:
            if self.signal_number is not None:
                raise KeyboardInterrupt
            yield
        finally:
            self.raises = False

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Lets no signal raise within."""
        self.is_saving = True
        try:
            yield
        finally:
            self.is_saving = False


def is_impatient(number: int, seconds: float) -> bool:
    """Whether a signal, `seconds` after the first one, asks to stop without saving."""
    return number == signal.SIGINT and seconds > IMPATIENT_SECONDS


@contextmanager
def listening(stop: StopRequest) -> Iterator[StopRequest]:
    """Lets the request hear signals within, where this is the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    with handling(stop.handle):
        _listeners.append(stop)
        try:
            yield stop
        finally:
            _listeners.remove(stop)


@contextmanager
def handling(
    handle: Callable[[int, FrameType | None], object],
    numbers: Collection[signal.Signals] = STOPPING,
) -> Iterator[None]:
    """Installs a handler of these signals for the context and restores the previous ones.

    An ignored SIGHUP (nohup) stays ignored. Python gives signals to the main thread alone: in
    another one there is nothing to install.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former: dict[signal.Signals, Any] = {n: signal.getsignal(n) for n in numbers}
    if former.get(signal.SIGHUP) == signal.SIG_IGN:
        del former[signal.SIGHUP]
    for number in former:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _say(line: str) -> None:
    """Prints from a handler, which may have interrupted the same stream, or beside one."""
    with suppress(OSError):
        # On a terminal a progress bar may end where this begins.
        os.write(2, f"{os.linesep if os.isatty(2) else ''}{line}\n".encode())


# -- a main thread that sees no signal -------------------------------------------------------------
def end_when_stuck() -> None:
    """Lets a second SIGINT end this process where its main thread does not handle it in time.

    Python's handlers run in the main thread, which may wait for a device, or for a rank that hangs
    in one: what it holds cannot be saved then. A run that is saving is waited for.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=_end_when_stuck, args=(reading,), daemon=True).start()


def _end_when_stuck(reading: int) -> None:
    _wait_for(STOPPING, reading)
    time.sleep(IMPATIENT_SECONDS)
    if select.select([reading], [], [], 0)[0]:
        os.read(reading, 1 << 16)
    if any(stop.signal_number is None for stop in _listeners):
        _say(STUCK)
    before = [stop.handled for stop in _listeners]
    _wait_for([signal.SIGINT], reading)
    time.sleep(SECONDS_TO_RAISE)
    while any(stop.is_saving for stop in _listeners):
        time.sleep(SECONDS_TO_RAISE)
    unseen = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if _listeners:
        unseen = before == [stop.handled for stop in _listeners]
    if unseen:
        os._exit(128 + signal.SIGINT)


def _wait_for(numbers: Collection[int], reading: int) -> None:
    while os.read(reading, 1)[0] not in numbers:
        pass


# -- output --------------------------------------------------------------------------------------
LOST = (errno.EPIPE, errno.EIO)
"""Error numbers of writing to a pipe without a reader, and to a closed terminal."""
_listeners: list[StopRequest] = []


class OutputLostError(OSError):
    """Nobody reads standard output, or standard error, any more."""


class LastingOutput(io.FileIO):
    """A descriptor that leads nowhere when its reader has ended.

    That is a request to stop where a run listens; elsewhere it raises OutputLostError.
    """

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in LOST:
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            if not _listeners:
                # Without its number, which click would take for an end with code 1.
                raise OutputLostError(error.strerror) from error
            for stop in list(_listeners):
                stop.handle(signal.SIGPIPE)
            return len(data)


def make_output_lasting() -> None:
    """Writes this process's sys.stdout and sys.stderr through `LastingOutput`s."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper):
            continue
        stream.flush()
        raw = LastingOutput(stream.fileno(), "w", closefd=False)
        # PYTHONUNBUFFERED leaves the buffer out.
        is_buffered = isinstance(stream.buffer, io.BufferedWriter)
        lasting = io.TextIOWrapper(
            io.BufferedWriter(raw) if is_buffered else cast(io.BufferedWriter, raw),
            stream.encoding,
            stream.errors,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        setattr(sys, name, lasting)
