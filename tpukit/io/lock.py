"""Locks between processes: the kernel releases them when their process ends, however it ends."""

import contextlib
import json
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tpukit.io.notebook import follower
from tpukit.io.process import is_alive, wait_for_end

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
    try:
        lock.acquire(timeout=0 if wait else DYING_SECONDS, poll_interval=POLL_SECONDS)
    except Timeout:
        if not wait:
            owner = _owner(path)
            raise LockedError(path, owner.process if owner else None) from None
        if on_wait is not None:
            on_wait()
        lock.acquire(poll_interval=POLL_SECONDS)
    try:
        _write_owner(path, Owner(os.getpid(), platform.node(), follower()))
        yield
    finally:
        _owner_file(path).unlink(missing_ok=True)
        lock.release()


def is_held(path: Path) -> bool:
    """Whether a process holds the lock file `path`."""
    from filelock import FileLock, Timeout

    if not path.exists():
        return False
    try:
        with FileLock(path, timeout=0):
            return False
    except Timeout:
        return True


@dataclass(frozen=True)
class Owner:
    """The process that holds a lock."""

    process: int
    host: str
    follower: int | None
    """The command of a notebook's cell with which it ends."""
    ending: bool = False
    """Whether it was asked to end."""

    def is_about_to_end(self) -> bool:
        """Whether it lives, on this host, and is going to end by itself."""
        if self.host != platform.node() or not is_alive(self.process):
            return False
        return self.ending or (self.follower is not None and not is_alive(self.follower))


def mark_ending(path: Path) -> None:
    """Says beside the lock file `path`, which this process holds, that it is about to end."""
    owner = _owner(path)
    if owner is not None:
        _write_owner(path, replace(owner, ending=True))


def wait_for_ending_owner(path: Path, on_wait: Callable[[int], None]) -> None:
    """Waits for an owner of the lock file `path` that was asked to end; for no other.

    Calls `on_wait` with its process id before.
    """
    owner = _owner(path)
    if owner is not None and owner.is_about_to_end():
        on_wait(owner.process)
        wait_for_end(owner.process)


def _owner_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.owner")


def _write_owner(path: Path, owner: Owner) -> None:
    _owner_file(path).write_text(json.dumps(asdict(owner)))


def _owner(path: Path) -> Owner | None:
    """The owner as it wrote itself down; None where the file is missing or of another version."""
    try:
        return Owner(**json.loads(_owner_file(path).read_text()))
    except (OSError, ValueError, TypeError):
        return None
