"""Locks between processes: the kernel releases them when their process ends, however it ends."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ORPHANS_SECONDS = 10.0
"""How long to wait for the children of an owner that was killed: they still hold its lock."""
POLL_SECONDS = 0.05


class LockedError(Exception):
    """Another process holds the lock; `owner` is its process id, None where it is unknown."""

    def __init__(self, path: Path, owner: int | None) -> None:
        super().__init__(f"{path} is locked by process {owner or 'unknown'}")
        self.owner = owner


@contextlib.contextmanager
def exclusive(
    path: Path, *, wait: bool = False, on_wait: Callable[[], None] | None = None
) -> Iterator[None]:
    """Holds the lock file `path`.

    wait: wait as long as another process holds it, after one call of `on_wait`. Without it, only
    for the children of an owner that is dead.

    Raises:
        LockedError: another process holds it (without `wait`).
        OSError: the file cannot be created.
    """
    from filelock import FileLock, Timeout

    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    owner_file = path.with_name(f"{path.name}.owner")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        if wait:
            if on_wait is not None:
                on_wait()
            lock.acquire(poll_interval=POLL_SECONDS)
        else:
            _wait_for_orphans(lock, owner_file)
    try:
        owner_file.write_text(str(os.getpid()))
        yield
    finally:
        owner_file.unlink(missing_ok=True)
        lock.release()


def _wait_for_orphans(lock: object, owner_file: Path) -> None:
    from filelock import FileLock, Timeout

    assert isinstance(lock, FileLock)
    deadline = time.monotonic() + ORPHANS_SECONDS
    while True:
        owner = _owner(owner_file)
        if owner is None or _is_alive(owner) or time.monotonic() > deadline:
            raise LockedError(Path(lock.lock_file), owner)
        with contextlib.suppress(Timeout):
            lock.acquire(timeout=POLL_SECONDS, poll_interval=POLL_SECONDS)
            return


def _owner(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
