"""Where the ranks of a launch find each other: in a store of each attempt's own."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

SCHEME = "tpukit"


@functools.cache
def init_method() -> str:
    """For `torch.distributed.init_process_group`: as `env://`, but restarts share no keys.

    torchrun keeps its store over a restart (`--max-restarts`), with the addresses of ranks that
    have ended: a rank that reads those before the new ones calls a closed port (pytorch issue
    135712). On several nodes each torchrun counts restarts on its own: there it is `env://`.
    """
    register_rendezvous_handler(SCHEME, _of_this_attempt)  # type: ignore[no-untyped-call]
    return f"{SCHEME}://"


def _of_this_attempt(
    url: str, timeout: timedelta, **options: Any
) -> Iterator[tuple[Store, int, int]]:
    nodes = os.environ.get("GROUP_WORLD_SIZE", "1")
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    for store, rank, world_size in rendezvous("env://", timeout=timeout, **options):
        own = PrefixStore(f"tpukit/attempt-{attempt}", store) if nodes == "1" else store
        yield own, rank, world_size
