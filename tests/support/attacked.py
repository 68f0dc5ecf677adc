"""Command lines under attack: in forks of a warm process, or in new processes."""

import functools
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import psutil
from forked import ForkedCommand, can_set
from runs import TINY, environment, latest

TRAIN = ["train", "--task", TINY, "--hw", "cpu", "--max-steps", "60", "--log-every", "7",
         "--ckpt-every", "3", "--set", "dropout=0.2", "--results-dir"]  # fmt: skip
"""A run of a second; its folder follows."""
UNEXPLAINED = "  Add --debug for the traceback."
SECONDS = 300
"""What a command may take; one that takes longer hangs."""


def start(
    argv: list[str], folder: Path, variables: dict[str, str] | None = None,
    limits: dict[int, int] | None = None,
) -> ForkedCommand:  # fmt: skip
    """A fork that has imported torch: an attack meets tpukit's own code, not the imports.

    Its output lies in `folder`.
    """
    given = environment(variables)
    assert can_set("torch", given), variables
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        return ForkedCommand(
            argv, "torch", limits=limits, env=given, cwd=folder, stdout=out, stderr=err,
            start_new_session=True,
        )  # fmt: skip


def check(code: int, told: str) -> str:
    """A command that ended by itself: "" where it is done, else its error of one or two lines."""
    assert "Traceback" not in told, told[-2000:]
    if code == 0:
        return ""
    assert code in (1, 2), (code, told[-2000:])
    assert "Error: " in told, told[-2000:]
    error = told[told.rindex("Error: ") :]
    assert len(error.splitlines()) <= 3 and not error.endswith(f"\n{UNEXPLAINED}\n"), error
    return error


def finish(argv: list[str], variables: dict[str, str] | None = None, *, new: bool = False) -> str:
    """Runs a command to its end; see `check`. `new`: in a process that imports everything."""
    if new or not can_set("torch", environment(variables)):
        done = subprocess.run(
            [sys.executable, "-m", "tpukit", *argv], env=environment(variables),
            capture_output=True, text=True, check=False, timeout=SECONDS,
        )  # fmt: skip
        return check(done.returncode, done.stderr)
    with tempfile.TemporaryDirectory() as place:
        started = start(argv, Path(place), variables)
        return check(wait(started), told_in(Path(place)))


def told_in(folder: Path) -> str:
    """The standard error so far of a command that was started with this folder."""
    return (folder / "err").read_text(errors="replace")


def succeed(argv: list[str], variables: dict[str, str] | None = None, *, new: bool = False) -> None:
    """Runs a command that must be done at its end."""
    error = finish(argv, variables, new=new)
    assert not error, error


def wait(started: ForkedCommand, seconds: float = SECONDS) -> int:
    """Its exit code; what takes too long is killed."""
    try:
        return started.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(started.pid, signal.SIGKILL)
        started.wait(SECONDS)
        raise


@functools.cache
def whole(argv: tuple[str, ...], variables: tuple[tuple[str, str], ...] = ()) -> tuple[str, float]:
    """What a command leaves that is never stopped, and its seconds.

    `argv`: all but the folder, which it names last.
    """
    with tempfile.TemporaryDirectory() as place:
        started = time.monotonic()
        succeed([*argv, str(Path(place, "made"))], dict(variables))
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


def family(pid: int) -> list[psutil.Process]:
    """A process and all that it started, as far as they live."""
    try:
        first = psutil.Process(pid)
        return [first, *first.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def assert_gone(processes: Iterable[psutil.Process], seconds: float = 30) -> None:
    """Ranks and workers notice that their owner has ended."""
    until = time.monotonic() + seconds
    left = list(processes)
    while left and time.monotonic() < until:
        left = [p for p in left if p.is_running() and _status(p) != psutil.STATUS_ZOMBIE]
        time.sleep(0.05)
    assert not left, f"still running: {left}"


def _status(process: psutil.Process) -> str:
    try:
        return process.status()
    except psutil.NoSuchProcess:
        return psutil.STATUS_ZOMBIE
