"""An agent on another host, started over ssh and asked through its standard input."""

from __future__ import annotations

import json
import os
import select
import shlex
import subprocess
import sys
import tempfile
from types import TracebackType
from typing import Any, Self

from tpukit.io.ranges import shown

SSH_VARIABLE = "TPUKIT_SSH"
"""The command that reaches a host, in place of SSH."""
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
START_SECONDS, ANSWER_SECONDS = 60.0, 120.0


class RemoteError(Exception):
    """Why a host gave no answer, or that it could not do what it was asked."""


class RemoteAgent:
    """One host's agent; tpukit is expected at the same place as here, as torchrun expects it."""

    def __init__(self, host: str) -> None:
        self.host = host
        words = shlex.split(os.environ.get(SSH_VARIABLE, "")) or SSH
        remote = shlex.join([sys.executable, "-m", "tpukit.probe.hosts.agent"])
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by close
        try:
            self._process = subprocess.Popen(
                [*words, host, remote],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            )  # fmt: skip
        except OSError as error:
            self._errors.close()
            raise RemoteError(f"{words[0]}: {error.strerror}") from error
        self._seconds = START_SECONDS

    @property
    def address(self) -> str:
        """How the other hosts call it: without the user."""
        return self.host.rpartition("@")[2]

    def ask(self, question: str, **arguments: Any) -> Any:
        """The answer.

        Raises:
            RemoteError: the host is not reached, or could not do it.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"ask": question, **arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise RemoteError(self._last_words()) from None
        if not select.select([self._process.stdout], [], [], self._seconds)[0]:
            raise RemoteError(f"no answer within {self._seconds:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise RemoteError(self._last_words())
        self._seconds = ANSWER_SECONDS
        try:
            told = json.loads(line)
        except ValueError:  # a shell's greeting
            raise RemoteError(
                f"its shell prints {shown(line.strip())} before any command"
            ) from None
        if "error" in told:
            raise RemoteError(told["error"])
        return told["answer"]

    def _last_words(self) -> str:
        self._process.wait(timeout=ANSWER_SECONDS)
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        return lines[-1] if lines else f"ssh ended with exit code {self._process.returncode}"

    def close(self) -> None:
        """Ends the agent: its input ends."""
        if self._process.poll() is None:
            self._process.terminate()
        self._process.communicate()
        self._errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()
