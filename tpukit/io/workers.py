"""Work in other processes: one that is ended in time, and a pool that ends with its parent."""

import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from tpukit.errors import JobError
from tpukit.io.process import end_with, ignore_stop_signals

Item = TypeVar("Item")
Result = TypeVar("Result")

AHEAD = 2
"""Number of items that each worker holds, so that it never waits for the next one."""


class EndedError(Exception):
    """A process ended without an answer."""

    def __init__(self, exit_code: int | None) -> None:
        super().__init__(f"exit code {exit_code}")
        self.exit_code = exit_code


class TimedCall:
    """A function in a process of its own, which is killed at a time limit.

    It leaves no memory, compiled program or default of a library behind.
    """

    def __init__(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], seconds: float,
        method: str,
    ) -> None:  # fmt: skip
        """Starts the process. method: fork, forkserver or spawn."""
        context: Any = multiprocessing.get_context(method)
        self._deadline = time.monotonic() + seconds
        self._receiver, sender = context.Pipe(duplex=False)
        self._process = context.Process(
            target=_send, args=(sender, function, arguments), daemon=True
        )
        self._process.start()
        sender.close()

    def wait(self) -> Any:
        """What the function returns. Raises TimeoutError, and EndedError where it gives nothing."""
        try:
            with self._receiver:
                if not self._receiver.poll(max(0.0, self._deadline - time.monotonic())):
                    raise TimeoutError
                return self._receiver.recv()
        except EOFError:
            self._process.join()
            raise EndedError(self._process.exitcode) from None
        finally:
            # A fork of a process with threads may hang, where it ignores a request to end.
            self._process.kill()
            self._process.join()


def _send(sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    sender.send(function(*arguments))


@contextmanager
def worker_pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of spawned processes with one thread of linear algebra each.

    They ignore SIGINT, SIGHUP and SIGTERM (the parent ends them), and die with the parent, however
    it dies.
    """
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start,
        initargs=(os.getpid(),),
    )
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _start(parent: int) -> None:
    # numpy reads these when it is imported, with the first item of work.
    for library in ("OMP", "OPENBLAS", "MKL"):
        os.environ[f"{library}_NUM_THREADS"] = "1"
    ignore_stop_signals()
    end_with(parent)


def map_ordered(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int
) -> Iterator[Result]:
    """`function` of each item, in the order of the items; a few are in flight at a time.

    Raises what the function raised; `JobError` where a worker was killed.
    """
    with worker_pool(workers) as pool, _naming_dead_workers():
        pending: deque[Future[Result]] = deque()
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) >= AHEAD * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


@contextmanager
def _naming_dead_workers() -> Iterator[None]:
    try:
        yield
    except BrokenProcessPool as error:
        raise JobError(
            "a worker process was killed before its work was done.",
            "The host may have run out of memory: use fewer workers, or run the command again.",
            id="worker-died",
        ) from error
