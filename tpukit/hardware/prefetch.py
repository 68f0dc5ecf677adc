"""Batches made ahead: the number of DataLoader workers, and a thread that sends to the device."""

import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

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


def loader_workers(backend: Backend, requested: int | None = None) -> int:
    """DataLoader workers of this rank: its share of those requested, else the default here."""
    if requested is not None:
        return -(-requested // backend.world_size)
    kind = backend.describe()["hardware"]
    if kind == "cpu" or (kind == "tpu" and is_emulated(os.environ)):
        # Steps on a CPU use every core: there the thread that trains makes the batches.
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
    """The loader's batches after `transfer`, which a thread makes up to `depth` ahead.

    The loader is read by the calling thread alone: what makes a batch may draw from the process's
    generators, and so may a training step. Errors are raised where the batch would come.
    """
    # Workers are started here: the kernel ties their lives to the thread that starts them.
    return _sent(iter(loader), transfer, depth)


def _sent(
    source: Iterator[Loaded], transfer: Callable[[Loaded], Sent], depth: int
) -> Iterator[Sent]:
    ahead: deque[Future[Sent]] = deque()
    ended = False
    sender = ThreadPoolExecutor(1, "prefetch")
    try:
        # The first batch does not wait for others to be made.
        for wanted in itertools.chain(range(1, depth + 1), itertools.repeat(depth + 1)):
            while len(ahead) < wanted and not ended:
                try:
                    ahead.append(sender.submit(transfer, next(source)))
                except StopIteration:
                    ended = True
                except Exception as error:
                    failed: Future[Sent] = Future()
                    failed.set_exception(error)
                    ahead.append(failed)
                    ended = True
            if not ahead:
                return
            yield ahead.popleft().result()
    finally:
        sender.shutdown(cancel_futures=True)
