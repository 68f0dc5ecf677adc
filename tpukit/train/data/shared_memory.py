"""The shared memory through which DataLoader workers pass their batches, and what full means."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tpukit.errors import JobError
from tpukit.io.units import format_bytes

FOLDER = Path("/dev/shm")
LITTLE_BYTES = 16 * 2**20
"""Free shared memory in which a batch may not find room."""
WORDS = ("unable to allocate shared memory", "unable to write to file </torch_")
"""How torch says that there is no room."""


def put_in_shared_memory(tensors: Iterable[Any]) -> None:
    """Moves a batch there in the worker itself, where the lack of room can be raised.

    Otherwise a thread would do it later, drop the batch, and leave the main process waiting.

    Raises JobError where there is no room.
    """
    with lack_of_room_named():
        for tensor in tensors:
            tensor.share_memory_()


@contextmanager
def lack_of_room_named() -> Iterator[None]:
    """Turns what torch raises without room, or after its time limit, into a JobError."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        # Semaphores and queues lie there too; an error about a disk names its file.
        number, file = getattr(error, "errno", None), getattr(error, "filename", None)
        is_full = number == errno.ENOSPC and file is None
        if is_full or any(words in str(error) for words in WORDS):
            raise _full() from error
        if "DataLoader timed out" in str(error):
            raise (_full() if _has_little_room() else _too_slow(str(error))) from error
        raise


def _has_little_room() -> bool:
    with suppress(OSError):
        return shutil.disk_usage(FOLDER).free < LITTLE_BYTES
    return False


def _full() -> JobError:
    size = ""
    with suppress(OSError):
        usage = shutil.disk_usage(FOLDER)
        size = f" ({format_bytes(usage.free)} of {format_bytes(usage.total)} free)"
    return JobError(
        f"the shared memory of the DataLoader workers is full: {FOLDER}{size}.",
        "Use fewer --num-workers (0 needs none), remove what fills it, or enlarge it (`docker run"
        " --shm-size=8g`); the same command resumes from the last checkpoint.",
        id="shared-memory",
    )


def _too_slow(text: str) -> JobError:
    return JobError(
        f"no batch from the DataLoader workers: {text}.",
        "A worker hangs, or its data are that slow: try --num-workers 0, or wait longer with --set"
        " loader_timeout=3600.",
        id="loader-timeout",
    )
