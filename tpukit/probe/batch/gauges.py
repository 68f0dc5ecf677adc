"""How much memory a trial takes at most: the device's own figure, or this process' on a CPU."""

from __future__ import annotations

import os
import threading
from types import TracebackType
from typing import Protocol

from tpukit.hardware.backend import Backend
from tpukit.hardware.detect import is_emulated
from tpukit.hardware.memory import data_bytes, host_memory_bytes

SECONDS_BETWEEN_LOOKS = 0.005


class Gauge(Protocol):
    """Watches memory within its context."""

    def __enter__(self) -> Gauge: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

    def taken(self) -> tuple[int, int] | None:
        """Bytes taken at this moment and at most so far; None where that is not known."""
        ...

    def reading(self, set_limit: int | None) -> tuple[int | None, int | None]:
        """Bytes taken at most, and those there are; None where that is not known."""
        ...


class ProcessGauge:
    """Private memory of this process beyond what it had: what a limit on it counts.

    The system keeps no peak of it, so a thread looks again and again.
    """

    def __init__(self) -> None:
        self.before = data_bytes()
        self.peak = self.before
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while not self._done.wait(SECONDS_BETWEEN_LOOKS):
            self.peak = max(self.peak, data_bytes())

    def __enter__(self) -> ProcessGauge:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._done.set()
        self._thread.join()
        self.peak = max(self.peak, data_bytes())

    def taken(self) -> tuple[int, int] | None:
        now = data_bytes()
        self.peak = max(self.peak, now)
        return now - self.before, self.peak - self.before

    def reading(self, set_limit: int | None) -> tuple[int | None, int | None]:
        return self.peak - self.before, set_limit or host_memory_bytes() - self.before


class DeviceGauge:
    """The peak that the device itself keeps."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        before = backend.memory()
        self.before = before.used if before else 0

    def __enter__(self) -> DeviceGauge:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        pass

    def taken(self) -> tuple[int, int] | None:
        memory = self.backend.memory()
        if memory is None:
            return None
        return memory.used - self.before, memory.peak - self.before

    def reading(self, set_limit: int | None) -> tuple[int | None, int | None]:
        memory = self.backend.memory()
        if memory is None:
            return None, set_limit
        return memory.peak - self.before, set_limit or memory.limit


def watched_memory(backend: Backend) -> Gauge:
    """The gauge that fits this hardware; made once the backend is open and its limit set."""
    on_host = backend.device.type == "cpu" or is_emulated(os.environ)
    return ProcessGauge() if on_host else DeviceGauge(backend)
