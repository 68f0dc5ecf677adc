"""Batches made ahead: the number of DataLoader workers, and a thread that sends to the device."""

import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from tpukit.hardware.backend import Backend
from tpukit.hardware.detect import is_emulated
from tpukit.io.process import allowed_cores

Loaded = TypeVar("Loaded")
Sent = TypeVar("Sent")

BATCHES_AHEAD = 2
WORKERS_A_DEVICE = 4
"""Most DataLoader workers of a device that a process shares with others."""
MOST_WORKERS = 16
"""Most DataLoader workers of a GPU's rank."""
SECONDS_TO_END = 5.0
"""Join timeout of the prefetch thread, in seconds."""
_END = object()


def loader_workers(backend: Backend, requested: int | None = None) -> int:
    """DataLoader workers of this rank: its share of those requested, else the default here."""
    if requested is not None:
        return -(-requested // backend.world_size)
    kind = backend.describe()["hardware"]
    if kind == "cpu" or (kind == "tpu" and is_emulated(os.environ)):
        # Steps on a CPU use every core: there a thread makes the batches.
        return 0
    if backend.device.type == "xla":
        return workers_of_devices(backend.devices // backend.world_size)
    return workers_of_rank(backend.world_size)


def workers_of_devices(devices: int) -> int:
    """The default of a process that drives `devices` devices; two cores stay free for it."""
    return max(0, min(allowed_cores() - 2, WORKERS_A_DEVICE * devices))


def workers_of_rank(world_size: int) -> int:
    """The default of a rank with one GPU, whose own process mostly waits for it."""
    return max(2, min(allowed_cores() // world_size, MOST_WORKERS))


def prefetch(
    loader: Iterable[Loaded], transfer: Callable[[Loaded], Sent], *, depth: int = BATCHES_AHEAD
) -> Iterator[Sent]:
    """The loader's batches after `transfer`, prepared up to `depth` ahead by a thread.

    The thread ends when the iterator is exhausted, closed or collected; its errors are raised here.
    """
    # Workers are started here: the kernel ties their lives to the thread that starts them.
    source = iter(loader)
    ready: queue.Queue[object] = queue.Queue(depth)
    stop = threading.Event()
    thread = threading.Thread(
        target=_fill, args=(source, transfer, ready, stop), name="prefetch", daemon=True
    )
    thread.start()
    return _drain(ready, stop, thread)


def _fill(
    source: Iterator[Loaded],
    transfer: Callable[[Loaded], Sent],
    ready: queue.Queue[object],
    stop: threading.Event,
) -> None:
    last: object = _END
    try:
        for batch in source:
            if stop.is_set() or not _put(ready, transfer(batch), stop):
                return
    except BaseException as error:
        last = error
    _put(ready, last, stop)


def _put(ready: queue.Queue[object], item: object, stop: threading.Event) -> bool:
    while not stop.is_set():
        try:
            ready.put(item, timeout=0.1)
        except queue.Full:
            continue
        return True
    return False


def _drain(
    ready: queue.Queue[object], stop: threading.Event, thread: threading.Thread
) -> Iterator[Any]:
    try:
        while (item := ready.get()) is not _END:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stop.set()
        thread.join(timeout=SECONDS_TO_END)
