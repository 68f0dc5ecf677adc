"""Processes: children that end with their parent, cores, and standard output."""

import atexit
import ctypes
import functools
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import subprocess

PR_SET_PDEATHSIG = 1
PARENT_VARIABLE = "TPUKIT_PARENT"


def die_with_parent(parent: int | None = None) -> None:
    """Asks the kernel to kill this process when the thread that started it ends.

    `parent`: the parent's process id where it is known; if it has ended already, this process is
    killed at once. Linux only; elsewhere nothing happens.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


class WorkerInit:
    """A DataLoader's `worker_init_fn`: its workers die with the process that made this object.

    A worker's parent may be a fork server, which in turn waits for its workers to end: each of
    them watches the main process itself.
    """

    def __init__(self) -> None:
        self.main = os.getpid()
        _kill_workers_at_exit()

    def __call__(self, worker: int) -> None:
        ignore_stop_signals()
        end_with(self.main)
        # The thread that sends tensors prints an error where the main process stops; data errors
        # are returned as values.
        sys.excepthook = lambda *_: None


@functools.cache
def _kill_workers_at_exit() -> None:
    # Registered after multiprocessing's own hook, so called before it: that one waits without a
    # limit, also for a worker that hangs since its fork and ignores SIGTERM.
    import multiprocessing.util

    def kill() -> None:
        for child in multiprocessing.active_children():
            if child.daemon:
                child.kill()

    atexit.register(kill)


def ignore_stop_signals() -> None:
    """Ignores what a terminal, `timeout` or a scheduler sends to all processes of a run: the main
    one saves first and ends its workers."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def end_with(process: int) -> None:
    """Kills this process as soon as `process` (any process, not only the parent) has ended."""
    watch = threading.Thread(target=_end_after, args=(process,), name="end-with", daemon=True)
    watch.start()


def _end_after(process: int) -> None:
    try:
        wait_for_end(process)
    finally:
        os.kill(os.getpid(), signal.SIGKILL)


def wait_for_end(process: int) -> None:
    """Returns when this process has ended."""
    with suppress(ProcessLookupError):
        if hasattr(os, "pidfd_open"):
            descriptor = os.pidfd_open(process)
            select.select([descriptor], [], [])
            return
        while True:
            os.kill(process, 0)
            time.sleep(1.0)


def end_group(process: "subprocess.Popen[bytes]", seconds: float) -> None:
    """Kills a process and those that it started, in their session of their own.

    One that hangs in a driver cannot be killed: it is waited for no longer than `seconds`.
    """
    import subprocess

    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.returncode = -signal.SIGKILL


def is_alive(process: int) -> bool:
    """Whether a process of this id exists."""
    import psutil

    return bool(psutil.pid_exists(process))


def allowed_cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def is_first_rank() -> bool:
    """Whether this process is rank 0, as launchers number them: before a device is opened."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def output_sent_to(path: str | Path, *descriptors: int) -> Iterator[None]:
    """Appends what is written to these descriptors meanwhile, by native libraries too, to a file.

    Errors that end the block are printed where output went before.
    """
    former = {descriptor: os.dup(descriptor) for descriptor in descriptors}
    _flush()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor in descriptors:
        os.dup2(file, descriptor)
    os.close(file)
    try:
        yield
    finally:
        _flush()
        for descriptor, kept in former.items():
            os.dup2(kept, descriptor)
            os.close(kept)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
