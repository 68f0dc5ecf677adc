"""Commands in a notebook's cell: knowing it, and a process that outlives the cell.

An interrupted cell kills its command within a second, which is too little to save a run. So the
command is a follower there: it starts the run in a session of its own, and passes on its output
and the signals.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from types import FrameType
from typing import IO, TYPE_CHECKING

from tpukit.io.interrupts import handling
from tpukit.io.process import wait_for_end

if TYPE_CHECKING:
    import subprocess

KERNEL_VARIABLES = ("JPY_PARENT_PID", "KAGGLE_KERNEL_RUN_TYPE", "COLAB_JUPYTER_TRANSPORT")
"""Environment variables that Jupyter, Kaggle and Colab set for a kernel and its commands."""
FOLLOWER_VARIABLE = "TPUKIT_FOLLOWER"
"""The follower's process id, in the environment of what it follows."""
SECONDS_TO_DRAIN = 5.0
"""Seconds to wait for output that a grandchild may still write."""
INTERRUPTED = (
    "\nInterrupted: the run (process {process}) saves a checkpoint after its present step, and"
    " ends. The same cell goes on.\n"
)


def in_notebook(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a kernel of Jupyter, Kaggle, Colab or VS Code started this process, or is it.

    A cell's `!command` has a terminal that no one looks at: what is written there is kept.
    """
    if any(environment.get(name) for name in KERNEL_VARIABLES):
        return True
    # Every other ipykernel (VS Code's) shows matplotlib's pictures inline, and says so.
    return environment.get("MPLBACKEND", "").endswith("backend_inline")


def follower(environment: Mapping[str, str] = os.environ) -> int | None:
    """The process id of the follower of this process, or of an ancestor of it."""
    given = environment.get(FOLLOWER_VARIABLE)
    return int(given) if given else None


def follow_this_command() -> int:
    """Runs this process's own command line detached; its exit code (128 + N after signal N)."""
    import subprocess

    run = subprocess.Popen(
        [sys.executable, *sys.orig_argv[1:]],
        env={**os.environ, FOLLOWER_VARIABLE: str(os.getpid())},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert run.stdout is not None and run.stderr is not None
    relays = [
        threading.Thread(target=_relay, args=pair, daemon=True)
        for pair in ((run.stdout, 1), (run.stderr, 2))
    ]
    with _signals_passed_on(run):
        for relay in relays:
            relay.start()
        code = run.wait()
        for relay in relays:
            relay.join(SECONDS_TO_DRAIN)
    if code < 0:
        print(f"The run was ended by {signal.Signals(-code).name}.", file=sys.stderr)
    return code if code >= 0 else 128 - code


def _signals_passed_on(run: subprocess.Popen[bytes]) -> AbstractContextManager[None]:
    received: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        run.send_signal(number)
        if not received:
            # At once: the cell shows what is written within a fifth of a second.
            with suppress(OSError):
                os.write(2, INTERRUPTED.format(process=run.pid).encode())
        received.append(number)

    return handling(pass_on)


def _relay(source: IO[bytes], target: int) -> None:
    """Copies until one side ends. A closed source stops the run: nobody reads its output."""
    with source, suppress(OSError):
        while chunk := os.read(source.fileno(), 1 << 16):
            while chunk:
                chunk = chunk[os.write(target, chunk) :]


def hang_up_with(process: int) -> None:
    """Sends this process SIGHUP, as a closed terminal does, when `process` has ended."""

    def hang_up() -> None:
        wait_for_end(process)
        os.kill(os.getpid(), signal.SIGHUP)

    threading.Thread(target=hang_up, name="hang-up", daemon=True).start()
