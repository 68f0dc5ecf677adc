"""Attacks on whole commands: kills at any moment, resources that run out, two writers at once."""

from __future__ import annotations

import functools
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from runs import TINY, environment, same_bytes

STEPS = "60"
ARGUMENTS = ["train", "--task", TINY, "--hw", "cpu", "--max-steps", STEPS, "--log-every", "7",
             "--ckpt-every", "3", "--set", "dropout=0.2"]  # fmt: skip
SECONDS = 300


def _command(run: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "tpukit", *ARGUMENTS, "--results-dir", str(run), *options]


def _run(
    run: Path, *options: str, limit: Callable[[], None] | None = None, **variables: str
) -> str:
    """A command that must end: 0 and "", or a failure's one or two lines."""
    done = subprocess.run(
        _command(run, *options), env=environment(variables), capture_output=True, text=True,
        check=False, timeout=SECONDS, preexec_fn=limit,
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr[-2000:]
    if done.returncode == 0:
        return ""
    assert done.returncode in (1, 2), (done.returncode, done.stderr[-2000:])
    at = done.stderr.rindex("Error: ")
    return done.stderr[at:]


@functools.cache
def _whole(*options: str) -> Path:
    """A run that was never stopped."""
    folder = Path(tempfile.mkdtemp()) / "run"
    assert _run(folder, *options) == ""
    return folder


def kill(number: int) -> None:
    """Attack `number`: a run killed up to three times at any moment, then left alone."""
    rng = random.Random(number)
    options = rng.choice([(), ("--num-workers", "1"), ("--devices", "2")])
    with tempfile.TemporaryDirectory() as place:
        run = Path(place) / "run"
        for _ in range(rng.randint(1, 3)):
            how = rng.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
            process = subprocess.Popen(
                _command(run, *options), env=environment(), stderr=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
            try:
                process.wait(rng.uniform(0.1, 12.0))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, how) if rng.random() < 0.5 else process.send_signal(how)
            process.wait(60)
        assert _run(run, *options) == ""
        assert same_bytes(run, _whole(*options))


def _limit(kind: int, value: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(kind, (value, value))


def starve(number: int) -> None:
    """Attack `number`: a resource that is not there; an error or a whole run, then a whole run."""
    rng = random.Random(number)
    with tempfile.TemporaryDirectory() as place:
        run = Path(place) / "run"
        limits: list[tuple[Callable[[], None] | None, dict[str, str]]] = [
            (_limit(resource.RLIMIT_FSIZE, rng.randrange(1, 60_000)), {}),
            (_limit(resource.RLIMIT_NOFILE, rng.randrange(8, 60)), {}),
            (None, {"HOME": "/proc/none", "XDG_CACHE_HOME": "/proc/none"}),
            (None, {"PATH": "/nowhere"}),
            (None, {"TMPDIR": "/proc/none"}),
            (None, {"TZ": "UTC+400000"}),
        ]
        limit, variables = limits[number % len(limits)]
        _run(run, limit=limit, **variables)
        assert _run(run) == ""
        assert same_bytes(run, _whole())


def two_writers(number: int) -> None:
    """Attack `number`: two runs in one folder; one is refused or finds a finished run."""
    rng = random.Random(number)
    with tempfile.TemporaryDirectory() as place:
        run = Path(place) / "run"
        both = []
        for _ in range(2):
            both.append(subprocess.Popen(_command(run), env=environment(),
                                         stderr=subprocess.PIPE, text=True))  # fmt: skip
            time.sleep(rng.uniform(0, 3))
        ended = [(p.communicate(timeout=SECONDS)[1], p.returncode) for p in both]
        assert 0 in [code for _, code in ended], ended
        for told, code in ended:
            assert "Traceback" not in told
            assert code == 0 or (code == 2 and "Another run is writing" in told), told[-500:]
        assert same_bytes(run, _whole())
