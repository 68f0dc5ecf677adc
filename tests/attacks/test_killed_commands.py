"""Attacks on processes: kills of every kind at any moment, and two writers at once."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from attacked import (
    SECONDS,
    TRAIN,
    assert_gone,
    content,
    family,
    start,
    succeed,
    wait,
    whole,
)
from runs import environment


@dataclass(frozen=True)
class Job:
    """A command whose last option names the folder that it writes to."""

    argv: tuple[str, ...]
    variables: tuple[tuple[str, str], ...] = ()
    new: bool = False
    """In a process of its own, so that imports are interrupted too."""
    kills: int = 3
    """Kills at most before it is left alone: fewer where a start takes long."""


def training(*more: str) -> tuple[str, ...]:
    return (*TRAIN[:-1], *more, TRAIN[-1])


JOBS = {
    "its imports too": Job(training(), new=True, kills=2),
    "a worker": Job(training("--num-workers", "1")),
    "data eit": Job(("data", "eit", "--n", "10", "--workers", "2", "--out"), kills=2),
    "data dialogues": Job(("data", "dialogues", "--n", "20000", "--out")),
    "data images": Job(("data", "images", "--n", "300", "--out")),
}
TRACKERS = re.compile(
    r'Traceback \(most recent call last\):\n  File "[^"]*/resource_tracker\.py", line \d+, '
    r"in main\n[^\n]*\nKeyError: [^\n]*\n"
)
"""What Python's resource tracker prints where it was killed and another takes its place."""
KILLS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("name", JOBS)
def test_a_killed_command_that_is_given_again_ends_alike(name, number, tmp_path):
    rng, job = random.Random(f"{name} {number}"), JOBS[name]
    expected, seconds = whole(job.argv, job.variables)
    command = [*job.argv, str(tmp_path / "made")]
    for _ in range(rng.randint(1, job.kills)):
        with _started(job, command, tmp_path) as pid:
            time.sleep(rng.uniform(0, 1.1 * seconds))
            processes = family(pid)
            _strike(rng, pid, processes)
        assert_gone(processes)
    succeed(command, dict(job.variables), new=job.new)
    assert content(tmp_path / "made") == expected, "other content"


@contextmanager
def _started(job: Job, command: list[str], place: Path) -> Iterator[int]:
    """The job's process, which ends by itself after what is done to it."""
    if job.new:
        with (place / "err").open("w") as err:
            process = subprocess.Popen(
                [sys.executable, "-m", "tpukit", *command], cwd=place, stderr=err,
                stdout=subprocess.DEVNULL, env=environment(dict(job.variables)),
                start_new_session=True,
            )  # fmt: skip
        try:
            yield process.pid
        finally:
            process.wait(SECONDS)
    else:
        started = start(command, place, dict(job.variables))
        try:
            yield started.pid
        finally:
            wait(started)
    told = TRACKERS.sub("", (place / "err").read_text(errors="replace"))
    # Python's own, where it is interrupted before tpukit is imported.
    assert "Traceback" not in told or told.endswith("\nKeyboardInterrupt\n"), told[-2000:]


def _strike(rng: random.Random, pid: int, processes: list[psutil.Process]) -> None:
    """One signal: to the process, to its whole session, or to one of its ranks and workers."""
    with suppress(ProcessLookupError, psutil.NoSuchProcess):
        if not processes:
            return
        match rng.choice(["process", "session", "child", "hold"]):
            case "process":
                os.kill(pid, rng.choice(KILLS))
            case "session":
                os.killpg(pid, rng.choice(KILLS))
            case "child":
                rng.choice(processes[1:] or processes).send_signal(
                    rng.choice([signal.SIGKILL, signal.SIGTERM])
                )
            case "hold":
                os.killpg(pid, signal.SIGSTOP)
                time.sleep(rng.uniform(0.1, 2))
                os.killpg(pid, signal.SIGCONT)
