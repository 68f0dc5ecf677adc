"""What a failed rank leaves for the others, in the store of torch.distributed: its own error
instead of a lost connection."""

import os
import platform
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
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
SECONDS_TO_ASK = 10.0
"""Time limit of a question to the store, whose host may have ended too."""


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
            raise _lost(_first_words(store), text) from error
        _leave(store, rank, f"{type(error).__name__}: {text}")
        raise


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
    _ask(lambda: store.compare_set(KEY, "", said))


def _first_words(store: Any) -> str | None:
    answer: list[str] = []

    def ask() -> None:
        if store.check([KEY]):
            answer.append(store.get(KEY).decode(errors="replace"))

    _ask(ask)
    return answer[0] if answer else None


def _ask(question: Callable[[], Any]) -> None:
    """Asks the store, whose host may have ended: for a while, and whatever comes of it."""

    def ask() -> None:
        with suppress(Exception):
            question()

    thread = threading.Thread(target=ask, daemon=True)
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
