"""What a failed rank leaves for the others: its own error instead of a lost connection.

Both travel through the store of torch.distributed: the first error, and each node's signs of life.
"""

import os
import platform
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from tpukit.errors import InterruptedRunError, JobError, TpukitError
from tpukit.io.code_owner import is_model_code

KEY = "tpukit/first-failure"
LOST = re.compile(
    r"gloo|Connection (?:closed|reset|refused)|Broken pipe|Timed out waiting|NCCL|"
    r"wait timeout|recvVal|pair closure", re.IGNORECASE,
)  # fmt: skip
"""How a collective ends on a rank whose peer has ended."""


def is_lost_connection(error: BaseException) -> bool:
    """Whether a collective ended as another rank had: in whoever's code it was called, unless a
    line of that code raised it."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return False
    is_lost = LOST.search(f"{type(error).__name__}: {error}") is not None
    return isinstance(error, RuntimeError) and is_lost and not _is_raised_by_a_user(error)


def _is_raised_by_a_user(error: BaseException) -> bool:
    [*_, last] = traceback.extract_tb(error.__traceback__) or [None]
    return last is not None and is_model_code(last.filename) and f"{last.line}".startswith("raise ")


@contextmanager
def failures_named() -> Iterator[None]:
    """Leaves the error of this rank for the others, which raise it in place of a lost connection.

    Raises:
        JobError: another rank failed, or its node cannot be reached any more.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        yield
        return
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    heartbeat = Heartbeat(store)
    heartbeat.start()
    try:
        yield
    except InterruptedRunError:
        raise
    except TpukitError as error:
        _leave(store, rank, error.message)
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        if is_lost_connection(error):
            words = _first_words(store)
            raise _lost(words, text, [] if words else heartbeat.silent_nodes()) from error
        _leave(store, rank, f"{type(error).__name__}: {text}")
        raise
    finally:
        heartbeat.stop()


def end_rank(code: int) -> NoReturn:
    """Ends this process; one of several ranks that failed ends without waiting for the others."""
    dist = sys.modules.get("torch.distributed")
    if code and dist is not None and dist.is_available() and dist.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        # The interpreter's end would destroy the process group, which NCCL does together.
        os._exit(code)
    sys.exit(code)


def _leave(store: Any, rank: int, words: str) -> None:
    """The first words stay: what fails later fails because of them."""
    said = f"node {platform.node()}, rank {rank}: {words}"
    asked_in_time(lambda: store.compare_set(KEY, "", said), SECONDS_TO_ASK)


def _first_words(store: Any) -> str | None:
    answer: list[str] = []

    def ask() -> None:
        if store.check([KEY]):
            answer.append(store.get(KEY).decode(errors="replace"))

    asked_in_time(ask, SECONDS_TO_ASK)
    return answer[0] if answer else None


def _lost(words: str | None, text: str, silent: list[str]) -> JobError:
    if words:
        return JobError(
            f"another rank failed. {words}",
            "Fix that, and run the same command on every node again: it resumes from the last "
            "checkpoint.",
            id="rank-failed",
        )
    whose = f" (no sign of life from node {', '.join(silent)})" if silent else ""
    return JobError(
        f"the connection to another rank was lost{whose}: {text[:200]}",
        "A node was killed or cannot be reached. Run the same command on every node again: it "
        "resumes from the last checkpoint (by itself with --max-restarts N).",
        id="node-lost",
    )


# -- signs of life ---------------------------------------------------------------------------------
SECONDS = 3.0
"""Between two signs of life of a node."""
SECONDS_TO_ASK = 10.0
"""A node that gives no sign for so long, or a store, is taken for lost."""


class Heartbeat:
    """The signs of life of this node, and those of the others; nothing where there is one node."""

    def __init__(self, store: Any) -> None:
        self.store = store.clone()
        self.node = int(os.environ.get("GROUP_RANK", "0"))
        self.nodes = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
        self.first = os.environ.get("MASTER_ADDR", "the first node")
        self.ended = threading.Event()

    def start(self) -> None:
        """Begins to give signs, from one rank of each node."""
        if self.nodes > 1 and os.environ.get("LOCAL_RANK", "0") == "0":
            threading.Thread(target=self._beat, daemon=True).start()

    def stop(self) -> None:
        self.ended.set()

    def silent_nodes(self) -> list[str]:
        """The other nodes that give no sign of life, by name; takes up to 20 seconds."""
        if self.nodes == 1:
            return []
        silent: list[str] = []
        answered = asked_in_time(lambda: silent.extend(self._silent()), 2 * SECONDS_TO_ASK)
        # The first node has the store.
        return silent if answered else [self.first]

    def _beat(self) -> None:
        with suppress(Exception):
            self.store.set(f"tpukit/node-{self.node}", platform.node())
            while not self.ended.wait(SECONDS):
                self.store.set(f"tpukit/alive-{self.node}", str(time.monotonic()))

    def _silent(self) -> list[str]:
        others = [number for number in range(self.nodes) if number != self.node]
        before = {number: self._read(f"tpukit/alive-{number}") for number in others}
        until = time.monotonic() + SECONDS_TO_ASK
        while others and time.monotonic() < until:
            time.sleep(0.5)
            others = [n for n in others if self._read(f"tpukit/alive-{n}") == before[n]]
        return [self._read(f"tpukit/node-{n}") or f"number {n}" for n in others]

    def _read(self, key: str) -> str:
        return self.store.get(key).decode(errors="replace") if self.store.check([key]) else ""


def asked_in_time(question: Any, seconds: float) -> bool:
    """Whether a question to the store, whose host may have ended, was answered in time."""
    answered = threading.Event()

    def ask() -> None:
        with suppress(Exception):
            question()
            answered.set()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return answered.is_set()
