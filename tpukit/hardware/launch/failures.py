"""What a failed rank leaves for the others: its own words instead of a lost connection."""

from __future__ import annotations

import platform
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from tpukit.errors import InterruptedRunError, JobError, TpukitError

KEY = "tpukit/first-failure"
SECONDS_TO_ASK = 10.0
"""The store's host may be the node that has ended: it is not waited for any longer."""
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
            raise _lost(_first_words(store), text) from error
        _leave(store, rank, f"{type(error).__name__}: {text}")
        raise


def _leave(store: Any, rank: int, words: str) -> None:
    """The first words stay: what fails later fails because of them."""
    said = f"node {platform.node()}, rank {rank}: {words}"
    _ask(lambda: store.compare_set(KEY, "", said))


def _first_words(store: Any) -> str | None:
    answer: list[str] = []

    def ask() -> None:
        if store.check([KEY]):
            answer.append(store.get(KEY).decode(errors="replace"))

    _ask(ask)
    return answer[0] if answer else None


def _ask(question: Any) -> None:
    """Asks the store, which may not answer."""

    def asked() -> None:
        with suppress(Exception):
            question()

    thread = threading.Thread(target=asked, daemon=True)
    thread.start()
    thread.join(SECONDS_TO_ASK)


def _lost(words: str | None, text: str) -> JobError:
    if words:
        return JobError(
            f"another rank failed. {words}",
            "Fix that, and run the same command on every node again: it resumes from the last "
            "checkpoint.",
            id="rank-failed",
        )
    return JobError(
        f"the connection to another rank was lost: {text[:200]}",
        "A node was killed or cannot be reached. Run the same command on every node again: it "
        "resumes from the last checkpoint (by itself with --max-restarts N).",
        id="node-lost",
    )
