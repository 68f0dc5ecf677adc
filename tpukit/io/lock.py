"""Locks between processes: the kernel releases them when their process ends, however it ends."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

DYING_SECONDS = 5.0
"""How long an owner that is about to end (its terminal closed, its children outlive it for a
moment) is waited for."""
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

    wait: wait as long as another process holds it, after one call of `on_wait`. Without it, a few
    seconds: an owner may be about to end.

    Raises:
        LockedError: another process holds it (without `wait`).
        OSError: the file cannot be created.
    """
    from filelock import FileLock, Timeout

    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    owner_file = path.with_name(f"{path.name}.owner")
    try:
        lock.acquire(timeout=0 if wait else DYING_SECONDS, poll_interval=POLL_SECONDS)
    except Timeout:
        if not wait:
            raise LockedError(path, _owner(owner_file)) from None
        if on_wait is not None:
            on_wait()
        lock.acquire(poll_interval=POLL_SECONDS)
    try:
        owner_file.write_text(str(os.getpid()))
        yield
    finally:
        owner_file.unlink(missing_ok=True)
        lock.release()


def _owner(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None
