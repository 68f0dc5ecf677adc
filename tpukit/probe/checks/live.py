"""The checks that start torch: in a child process with a time limit, so that nothing can hang."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from tpukit.probe.checks.verdict import Asked, Result, Verdict, failed, skipped
from tpukit.probe.facts import Facts

STEPS = {
    "torch-starts": "torch can be imported",
    "device-opens": "The device opens",
    "matrix-product": "A matrix product in fp32 and bf16 agrees with float64",
    "training-step": "A step of the engine runs",
}
CHILD = "tpukit.probe.checks.live_child"


def run_live_checks(facts: Facts, asked: Asked) -> Iterator[Result]:
    """Starts the child and turns what it says, or that it says nothing, into results."""
    if facts.version("torch") is None:
        for name, label in STEPS.items():
            yield Result(name, label, skipped("torch is not installed"))
        return
    waiting, has_failed = dict(STEPS), False
    for answer in ask_child([sys.executable, "-m", CHILD, asked.hw], asked.live_seconds):
        name = str(answer.get("id"))
        if name in waiting:
            verdict = Verdict(answer["status"], str(answer["message"]), answer.get("fix"))
            has_failed = has_failed or verdict.status == "fail"
            yield Result(name, waiting.pop(name), verdict)
        elif name == "end":
            yield from _unanswered(waiting, "" if has_failed else str(answer["message"]), asked)
            return


def _unanswered(waiting: Mapping[str, str], reason: str, asked: Asked) -> Iterator[Result]:
    """The step that the child stopped in has failed; those behind it were not tried."""
    for index, (name, label) in enumerate(waiting.items()):
        if index or not reason:
            yield Result(name, label, skipped("not tried: a step before it failed"))
        else:
            yield Result(name, label, failed(reason, _way_on(reason, asked)))


def _way_on(reason: str, asked: Asked) -> str:
    if "no answer" in reason:
        return (
            f"tpukit doctor --quick --hw {asked.hw}    # who holds the device; then try with "
            "TPU_SKIP_MDS_QUERY=1 TORCH_DEVICE_BACKEND_AUTOLOAD=0 set"
        )
    return f"tpukit doctor --quick --hw {asked.hw}    # what the versions and the device say"


def ask_child(command: list[str], seconds: float) -> Iterator[dict[str, Any]]:
    """The JSON objects a child writes to its descriptor 3; at last `{"id": "end", "message": ...}`
    with the reason why there are no more, empty where it ended well.

    The child and everything it started is killed at the time limit.
    """
    receiver, sender = os.pipe()
    environment = {**os.environ, "TPUKIT_ANSWER_FD": str(sender), "PYTHONFAULTHANDLER": "1"}
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        pass_fds=[sender],
        env=environment,
        start_new_session=True,
    ) as child:
        os.close(sender)
        try:
            reader = _Reader(receiver, child.stderr.fileno() if child.stderr else -1)
            yield from reader.answers(time.monotonic() + seconds)
            yield {"id": "end", "message": _reason(child, reader, seconds)}
        finally:
            _kill(child)
            os.close(receiver)


class _Reader:
    """Reads the child's answers and the end of its standard error, until both are closed."""

    def __init__(self, answers: int, errors: int) -> None:
        self._open = {answers, errors} - {-1}
        self._answers = answers
        self._pending = b""
        self.errors = b""
        self.timed_out = False

    def answers(self, deadline: float) -> Iterator[dict[str, Any]]:
        while self._answers in self._open:
            ready = select.select(list(self._open), [], [], max(deadline - time.monotonic(), 0))[0]
            if not ready:
                self.timed_out = True
                return
            for descriptor in ready:
                yield from self._take(descriptor)

    def _take(self, descriptor: int) -> Iterator[dict[str, Any]]:
        data = os.read(descriptor, 1 << 16)
        if not data:
            self._open.discard(descriptor)
        elif descriptor != self._answers:
            self.errors = (self.errors + data)[-(1 << 16) :]
        else:
            *lines, self._pending = (self._pending + data).split(b"\n")
            yield from (json.loads(line) for line in lines)


def _reason(child: subprocess.Popen[bytes], reader: _Reader, seconds: float) -> str:
    if reader.timed_out:
        return f"no answer within {seconds:g} s"
    try:
        code = child.wait(timeout=5)
    except subprocess.TimeoutExpired:
        return ""
    if code == 0:
        return ""
    from tpukit.knowledge.errors import explain_text

    text = reader.errors.decode("utf-8", errors="replace")
    known = explain_text(text)
    last = next((line.strip() for line in reversed(text.split("\n")) if line.strip()), "")
    said = f"{known.cause} {known.fix}" if known else last[:200]
    ended = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return f"the process ended with {ended}: {said}"


def _kill(child: subprocess.Popen[bytes]) -> None:
    """Ends the child with all that it started. One that hangs in a driver is not waited for."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    if child.stderr is not None:
        child.stderr.close()
    try:
        child.wait(timeout=5)
    except subprocess.TimeoutExpired:
        child.returncode = -signal.SIGKILL
