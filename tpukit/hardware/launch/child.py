"""A child process that answers requests, and may crash, hang or run out of memory meanwhile."""

import fcntl
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tpukit.hardware.memory import is_out_of_memory_text
from tpukit.io.process import end_group

OUTPUT_KEPT = 20_000
"""Bytes of a child's last output that are read when it dies."""
MOST_OUTPUT = 256 << 20
"""A child that writes more is stuck in a loop: it must not fill the disk."""
SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_TO_FINISH = 20.0
"""For a child that has nothing more to answer."""
SECONDS_TO_END = 5.0
"""Wait for a killed process, in seconds; one that hangs in a driver never ends."""

_FATAL = re.compile(r"^F\d{4} [\d:.]+ +\d+ (?P<place>\S+:\d+)\] (?P<said>.+)", re.M)
"""A line of level FATAL in the logs of Abseil and glog."""


@dataclass(frozen=True)
class Death:
    """How a child process ended without an answer."""

    return_code: int | None
    """None: it was ended after its time limit."""
    output: str
    """The end of what it wrote."""

    def describe(self) -> str:
        """As a phrase: `ended by SIGKILL`."""
        if self.return_code is None:
            return "no answer within the time limit"
        if self.return_code < 0:
            return f"ended by {_signal_name(-self.return_code)}"
        if self.return_code > 128:
            return f"ended by {_signal_name(self.return_code - 128)}"
        return f"ended with exit code {self.return_code}"

    @property
    def last_line(self) -> str:
        """The last line that is not blank, or empty; 200 characters at most."""
        lines = (line.strip() for line in reversed(self.output.splitlines()))
        return next(filter(None, lines), "")[:200]

    @property
    def failed_check(self) -> str:
        """What a C++ library said as it ended the process (`Check failed: ...`), or empty."""
        found = _FATAL.search(self.output)
        return f"{found['said'].strip()} ({found['place']})"[:200] if found else ""

    def is_out_of_memory(self, *, limited: bool) -> bool:
        """Whether it ran out of memory: its output says so, the kernel killed it, or it hung.

        limited: a memory limit was set on it, under which libraries abort in odd places.
        """
        if self.return_code is None or is_out_of_memory_text(self.output):
            return True
        number = -self.return_code if self.return_code < 0 else self.return_code - 128
        if number == signal.SIGKILL:
            return True
        return limited and number in (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class ChildDiedError(Exception):
    """The child gave no answer."""

    def __init__(self, death: Death) -> None:
        super().__init__(death.describe())
        self.death = death


class Child(AbstractContextManager["Child"]):
    """A process in a group of its own; leaving the context ends the whole group.

    Each question and each answer is a line of JSON; what libraries print goes to a file.
    """

    def __init__(self, environment: Mapping[str, str], command: Sequence[str]) -> None:
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        # What is appended goes on at the new end when the file is cut.
        fcntl.fcntl(self._output, fcntl.F_SETFL, os.O_APPEND)
        reading, writing = os.pipe()
        self._answers = reading
        self._buffer = b""
        try:
            self._process = subprocess.Popen(
                [sys.executable, *command, str(writing), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=self._output,
                stderr=self._output,
                env={**os.environ, **environment},
                pass_fds=(writing,),
                start_new_session=True,
            )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, question: Mapping[str, Any]) -> None:
        """Sends a question; if the child has ended, `receive` raises."""
        stdin = self._process.stdin
        assert stdin is not None
        with suppress(BrokenPipeError):
            stdin.write(json.dumps(question).encode() + b"\n")
            stdin.flush()

    def receive(self, deadline: float) -> dict[str, Any]:
        """The answer to the oldest question; `deadline` is a time of `time.monotonic`.

        Raises:
            ChildDiedError: the child ended, or the deadline passed (it is ended then).
        """
        line = self._read_line(deadline)
        if line is None:
            raise self._death(timed_out=time.monotonic() >= deadline)
        answer: dict[str, Any] = json.loads(line)
        return answer

    @property
    def has_ended(self) -> bool:
        """Whether the child itself has ended; its own children may still keep its pipe open."""
        return self._process.poll() is not None

    def _read_line(self, deadline: float) -> bytes | None:
        """The next line of the answers; None when the child has ended or its time is up."""
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            # A forked grandchild keeps the pipe open: its end is not enough.
            has_ended = self.has_ended
            wait = 0.0 if has_ended else min(left, SECONDS_BETWEEN_LOOKS)
            if not select.select([self._answers], [], [], wait)[0]:
                if has_ended:
                    return None
                if os.fstat(self._output.fileno()).st_size > MOST_OUTPUT:
                    self._output.truncate(0)
                continue
            chunk = os.read(self._answers, 1 << 20)
            if not chunk:
                return None
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _death(self, *, timed_out: bool) -> ChildDiedError:
        if not timed_out:
            try:
                self._process.wait(SECONDS_TO_END)
            except subprocess.TimeoutExpired:
                timed_out = True
        code = None if timed_out else self._process.returncode
        self._end_group()
        return ChildDiedError(Death(code, self.output()))

    def output(self) -> str:
        """The end of what the child has written so far."""
        # Its own descriptor: the child shares this file's position.
        path = Path(f"/proc/self/fd/{self._output.fileno()}")
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - OUTPUT_KEPT))
            return file.read().decode(errors="replace")

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def end(self, reason: str) -> None:
        """Kills the child; its output ends with the reason."""
        os.write(self._output.fileno(), f"\n{reason}\n".encode())
        self._end_group()

    def _end_group(self) -> None:
        end_group(self._process, SECONDS_TO_END)

    def finish(self, seconds: float = SECONDS_TO_FINISH) -> None:
        """Lets the child end by itself, which gives its device back in order, then closes it."""
        stdin = self._process.stdin
        assert stdin is not None
        with suppress(BrokenPipeError):
            stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        self.close()

    def close(self) -> None:
        """Ends the child and everything it started; a second call does nothing."""
        if self._answers < 0:
            return
        self._end_group()
        if self._process.stdin:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        os.close(self._answers)
        self._answers = -1
        self._output.close()
