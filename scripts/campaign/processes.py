"""Attacks on processes: kills of every kind at any moment, and two writers at once."""

import functools
import hashlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from runs import VIRTUAL_TPU, environment, latest

from campaign.commands import (
    SECONDS,
    TRAIN,
    assert_gone,
    check,
    family,
    start,
    succeed,
    told_in,
    wait,
)


@dataclass(frozen=True)
class Job:
    """A command that writes to a folder, and how often it is chosen."""

    argv: tuple[str, ...]
    share: int
    folder_option: str = "--results-dir"
    variables: dict[str, str] = field(default_factory=dict)
    new: bool = False
    """In a process of its own, so that imports are interrupted too."""
    most: int = 3
    """Kills of one attack: fewer where a start takes long."""

    def command(self, folder: Path) -> list[str]:
        return [*self.argv, self.folder_option, str(folder)]


TINY_TRAIN = tuple(TRAIN)
JOBS = {
    "one process": Job(TINY_TRAIN, 6),
    "its imports too": Job(TINY_TRAIN, 2, new=True, most=2),
    "a worker": Job((*TINY_TRAIN, "--num-workers", "1"), 4),
    "two ranks": Job((*TINY_TRAIN, "--devices", "2"), 2, most=1),
    "shards": Job((*TINY_TRAIN, "--devices", "2", "--shard"), 1, most=1),
    "xla": Job(
        ("train", *TINY_TRAIN[1:3], "--hw", "tpu", *TINY_TRAIN[5:]), 1,
        variables={**VIRTUAL_TPU, "CPU_NUM_DEVICES": "2"}, most=1,
    ),
    "data eit": Job(("data", "eit", "--n", "10", "--workers", "2"), 2, "--out", most=2),
    "data dialogues": Job(("data", "dialogues", "--n", "20000"), 1, "--out"),
    "data images": Job(("data", "images", "--n", "300"), 1, "--out"),
}  # fmt: skip
KILLS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@functools.cache
def whole(name: str) -> tuple[str, float]:
    """What a job that is never stopped leaves, and the seconds that it takes."""
    job, started = JOBS[name], time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        succeed(job.command(Path(place, "made")), job.variables, new=job.new)
        return content(Path(place, "made")), time.monotonic() - started


def content(folder: Path) -> str:
    """The digest of a run's newest checkpoint, or of all files of a data set."""
    if (folder / "checkpoints").exists():
        files = sorted(latest(folder).glob("*.safetensors"))
    else:
        files = sorted(p for p in folder.rglob("*") if p.is_file() and p.suffix != ".lock")
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.relative_to(folder)}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def kill(number: int) -> None:
    """Attack `number`: a command killed or held one to three times, then left alone."""
    rng = random.Random(number)
    [name] = rng.choices(list(JOBS), [job.share for job in JOBS.values()])
    job = JOBS[name]
    expected, seconds = whole(name)
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "made"
        for _ in range(rng.randint(1, job.most)):
            with _started(job, out, Path(place)) as pid:
                time.sleep(rng.uniform(0, 1.1 * seconds))
                processes = family(pid)
                _strike(rng, pid, processes)
            assert_gone(processes)
        succeed(job.command(out), job.variables, new=job.new)
        assert content(out) == expected, f"{name}: other content"


@contextmanager
def _started(job: Job, out: Path, place: Path) -> Iterator[int]:
    """The job's process, which ends by itself after what is done to it."""
    if job.new:
        with (place / "err").open("w") as err:
            process = subprocess.Popen(
                [sys.executable, "-m", "tpukit", *job.command(out)], cwd=place, stderr=err,
                stdout=subprocess.DEVNULL, env=environment(job.variables), start_new_session=True,
            )  # fmt: skip
        try:
            yield process.pid
        finally:
            process.wait(SECONDS)
    else:
        started = start(job.command(out), place, job.variables)
        try:
            yield started.pid
        finally:
            wait(started)
    told = (place / "err").read_text(errors="replace")
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


def two_writers(number: int) -> None:
    """Attack `number`: two runs in one folder; one is refused or finds a finished run."""
    rng = random.Random(number)
    expected, seconds = whole("one process")
    with tempfile.TemporaryDirectory() as place:
        out, both = Path(place) / "made", []
        for writer in range(2):
            folder = Path(place) / str(writer)
            folder.mkdir()
            both.append(start(JOBS["one process"].command(out), folder))
            time.sleep(rng.uniform(0, 1.1 * seconds))
        ended = [(wait(writer), told_in(Path(place, str(n)))) for n, writer in enumerate(both)]
        assert 0 in [code for code, _ in ended], ended
        for code, told in ended:
            error = check(code, told)
            assert not error or "Another run is writing" in error, error
        assert content(out) == expected
