"""What a failed rank leaves for the others: its own words instead of a lost connection."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from tpukit.errors import InterruptedRunError, JobError, TpukitError
from tpukit.hardware.launch.heartbeat import SECONDS_TO_ASK, Heartbeat, asked_in_time

KEY = "tpukit/first-failure"
LOST = re.compile(
    r"gloo|Connection (?:closed|reset|refused)|Broken pipe|Timed out waiting|NCCL|"
    r"wait timeout|recvVal", re.IGNORECASE,
)  # fmt: skip
"""How a collective ends on a rank whose peer has ended."""


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
        if isinstance(error, RuntimeError) and LOST.search(f"{type(error).__name__}: {text}"):
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
