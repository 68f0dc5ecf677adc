"""The steps of a run that a profiler records."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tpukit.hardware.backend import Backend
from tpukit.hardware.profiling import profile


class ProfiledSteps:
    """A trace of a few steps after the first ones, which compile and warm caches."""

    SKIPPED, COUNT = 3, 3

    def __init__(self, backend: Backend, folder: Path | None, first_step: int) -> None:
        self.backend = backend
        self.folder = folder
        self.first = first_step + self.SKIPPED
        self._trace = ExitStack()

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around step `step` (from 0)."""
        if self.folder is None:
            yield
            return
        if step == self.first:
            self._trace.enter_context(profile(self.backend, self.folder))
        yield
        if step == self.first + self.COUNT - 1:
            self._trace.close()
