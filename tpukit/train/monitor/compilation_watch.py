"""Counts compilations, by what they were for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tpukit.hardware.backend import Backend, Batch


class CompilationWatch:
    """Counts compilations after the warm-up, which should not happen.

    An activity (training on one set of shapes, evaluating, reading) may compile the first time
    it is seen; whatever it compiles later is counted as after the warm-up.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.seen: set[Any] = set()
        self.counted = backend.compilations()
        self.graphs: dict[str, int] = {"start": self.counted}
        """Compilations by kind of activity."""
        self.after_warmup = 0

    def has_seen(self, kind: str, shapes: Any = None) -> bool:
        """Whether an activity was counted before: it need not compile again."""
        return (kind, shapes) in self.seen

    def done(self, kind: str, shapes: Any = None) -> int:
        """Counts the compilations since the last call; returns how many were unexpected."""
        now = self.backend.compilations()
        fresh, self.counted = now - self.counted, now
        if fresh:
            self.graphs[kind] = self.graphs.get(kind, 0) + fresh
        if (kind, shapes) not in self.seen:
            self.seen.add((kind, shapes))
            return 0
        self.after_warmup += fresh
        return fresh


def shapes_of(batches: Iterable[Batch]) -> tuple[Any, ...]:
    """What a compiled graph depends on."""
    return tuple(tuple(tensor.shape) for batch in batches for tensor in batch.values())
