"""Runs a command whose output also goes to a log: terminal, exit code and signals as without."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import subprocess
import termios
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from tpukit.io.output_log import OutputLog
from tpukit.io.process import die_with_parent

_PASSED_ON = {
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2,
    signal.SIGCONT, signal.SIGWINCH,
}  # fmt: skip
_KEYS = {signal.SIGINT, signal.SIGQUIT, signal.SIGHUP}
"""Signals that a terminal sends to all processes of a command."""
_PIECE_BYTES = 1 << 16
_IDLE_SECONDS = 0.5
"""Seconds without output after which the log is written out."""
_SECONDS_TO_DRAIN = 5.0
"""Seconds that output of processes which the command left behind is read."""
_OUTPUT_ONLY = 1
"""Index of the output modes in `termios.tcgetattr`."""


class Relay:
    """A command on this process's own standard input, output and error.

    Where one of the outputs is a terminal the command sees a terminal, too. It stays in the
    foreground of this one, so that keys reach it directly; where the input is something else it
    has a process group of its own.
    """

    def __init__(self, command: Sequence[str], log: OutputLog) -> None:
        """Starts the command. Raises OSError where it cannot be started."""
        self.log = log
        self.returncode: int | None = None
        self.received: set[signal.Signals] = set()
        """Signals that this process was sent meanwhile."""
        self._is_group = not os.isatty(0)
        self._targets: dict[int, int] = {}
        self._terminal: int | None = None
        ends = self._open_outputs()
        former = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
        self._former_mask = former
        parent = os.getpid()

        def prepare() -> None:
            signal.pthread_sigmask(signal.SIG_SETMASK, former)
            die_with_parent(parent)

        try:
            self.process = subprocess.Popen(
                command, stdout=ends[0], stderr=ends[1], preexec_fn=prepare,  # noqa: PLW1509 - no thread yet
                process_group=0 if self._is_group else None,
            )  # fmt: skip
        except OSError:
            signal.pthread_sigmask(signal.SIG_SETMASK, former)
            raise
        finally:
            for end in set(ends):
                os.close(end)
        threading.Thread(target=self._pass_signals_on, name="signals", daemon=True).start()

    def wait(self, silence: float, on_silence: Callable[[float], None]) -> int:
        """The command's return code, as `subprocess` counts it, when its output has ended.

        `on_silence` is called once in each `silence` seconds or more without output.
        """
        poll = select.poll()
        for source in self._targets:
            poll.register(source, select.POLLIN)
        last, is_reported, ended = time.monotonic(), False, None
        while self._targets or ended is None:
            ready = poll.poll(_IDLE_SECONDS * 1000) if self._targets else []
            for source, _ in ready:
                if not self._copy(source):
                    poll.unregister(source)
            now = time.monotonic()
            if ready:
                last, is_reported = now, False
                if ended is None or now - ended < _SECONDS_TO_DRAIN:
                    continue
            if ended is not None:
                break
            self.log.flush()
            if self._has_ended(0 if self._targets else _IDLE_SECONDS):
                ended = now
            elif now - last >= silence and not is_reported:
                is_reported = True
                on_silence(now - last)
        for source in list(self._targets):
            self._drop(source)
        self.returncode = self.process.wait()
        signal.pthread_sigmask(signal.SIG_SETMASK, self._former_mask)
        return self.returncode

    def _open_outputs(self) -> tuple[int, int]:
        """The command's ends of its standard output and error."""
        if os.path.sameopenfile(1, 2) or (os.isatty(1) and os.isatty(2)):
            end = self._open_output(1)
            return end, end
        return self._open_output(1), self._open_output(2)

    def _open_output(self, target: int) -> int:
        if os.isatty(target):
            source, end = pty.openpty()
            self._terminal = source
            modes = termios.tcgetattr(end)
            modes[_OUTPUT_ONLY] = 0  # the real terminal turns newlines into its own
            termios.tcsetattr(end, termios.TCSANOW, modes)
            self._fit_terminal(target)
        else:
            source, end = os.pipe()
        self._targets[source] = target
        return end

    def _fit_terminal(self, target: int) -> None:
        if self._terminal is not None:
            with suppress(OSError):
                size = fcntl.ioctl(target, termios.TIOCGWINSZ, bytes(8))
                fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, size)

    def _copy(self, source: int) -> bool:
        """Copies what has come; false where one side has ended."""
        target = self._targets[source]
        try:
            data = os.read(source, _PIECE_BYTES)
            _write_all(target, data)
        except OSError:
            data = b""
        if not data:
            self._drop(source)
            return False
        self.log.add(target, data)
        return True

    def _drop(self, source: int) -> None:
        """Closes an output: the command cannot write to it any more."""
        del self._targets[source]
        if source == self._terminal:
            self._terminal = None
        os.close(source)

    def _has_ended(self, seconds: float) -> bool:
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _pass_signals_on(self) -> None:
        while True:
            received = signal.sigwaitinfo(_PASSED_ON)
            number = signal.Signals(received.si_signo)
            if self.returncode is not None:
                os._exit(128 + number)
            self.received.add(number)
            if number == signal.SIGWINCH and self._terminal is not None:
                self._fit_terminal(next(t for t in self._targets.values() if os.isatty(t)))
            # The kernel (a positive code) has sent what a key means to the whole foreground.
            if self._is_group or received.si_code <= 0 or number == signal.SIGWINCH:
                with suppress(ProcessLookupError):
                    if self._is_group and number in _KEYS:
                        os.killpg(self.process.pid, number)
                    else:
                        self.process.send_signal(number)


def _write_all(target: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(target, data) :]
        except BlockingIOError:
            select.select([], [target], [])
