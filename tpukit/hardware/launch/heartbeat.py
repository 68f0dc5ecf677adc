"""Which nodes of a run live: each says so in the store, every few seconds."""

from __future__ import annotations

import os
import platform
import threading
import time
from contextlib import suppress
from typing import Any

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
