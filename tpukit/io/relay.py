"""Runs a command whose output also goes to a log: terminal, exit code and signals as without."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import termios
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

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

    def __init__(
        self, command: Sequence[str], log: OutputLog, env: Mapping[str, str] | None = None
    ) -> None:
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
                process_group=0 if self._is_group else None, env=env,
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


# -- the log -------------------------------------------------------------------------------------
MOST_BYTES = 16 << 20
"""Maximum bytes of the log; what came before them is dropped."""
_LONGEST_BEGUN = 1 << 16
"""Bytes of a line without an end that are kept in memory."""
_OVERWRITTEN = re.compile(rb"[^\n\r]*\r(?=[^\n\r])")
"""What a progress bar draws over."""


class OutputLog:
    """Receives the output of several streams, in which lines may come in pieces."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._older = path.with_name(f"{path.name}.older")
        self._file = path.open("wb")
        self._size = 0
        self.lost: str | None = None
        """Why the log ends before the output does: the disk is full, say."""
        self._begun: dict[int, bytes] = defaultdict(bytes)

    def add(self, stream: int, data: bytes) -> None:
        """Adds output of one stream; a line is written when it ends."""
        begun = self._begun[stream]
        lines, newline, rest = (begun + data if begun else data).rpartition(b"\n")
        if len(rest) > _LONGEST_BEGUN:
            lines, newline, rest = lines + newline + rest, b"\n", b""
        if newline:
            self._write(lines)
        self._begun[stream] = _OVERWRITTEN.sub(b"", rest) if b"\r" in rest else rest

    def note(self, text: str) -> None:
        """Adds a line of tpukit's own, after what the streams have begun."""
        self._end_lines()
        self._write(f"tpukit run: {text}".encode())
        self.flush()

    def flush(self) -> None:
        """Writes to the file what has come, but for lines without an end."""
        with self._going_on():
            self._file.flush()

    def close(self) -> None:
        """Writes everything, in one file."""
        self._end_lines()
        with self._going_on():
            self._file.close()
            if self._older.exists():
                with self._older.open("ab") as whole, self.path.open("rb") as newest:
                    shutil.copyfileobj(newest, whole)
                self._older.replace(self.path)

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        """Where the file cannot be written, the log ends; the command goes on."""
        try:
            yield
        except OSError as error:
            self.lost = error.strerror
            with suppress(OSError):
                self._file.close()
            self._file = Path(os.devnull).open("wb")  # noqa: SIM115 - as the log was

    def _end_lines(self) -> None:
        for rest in self._begun.values():
            if rest.strip():
                self._write(rest)
        self._begun.clear()

    def _write(self, lines: bytes) -> None:
        if b"\r" in lines:
            lines = _OVERWRITTEN.sub(b"", lines)
        now = time.time()
        whole = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
        stamp = f"{whole}.{int(now % 1 * 1000):03d} ".encode()
        with self._going_on():
            self._size += self._file.write(stamp + lines.replace(b"\n", b"\n" + stamp) + b"\n")
            if self._size > MOST_BYTES // 2:
                self._file.close()
                self.path.replace(self._older)
                self._file, self._size = self.path.open("wb"), 0
