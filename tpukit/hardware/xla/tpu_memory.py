"""Memory and load of a TPU's devices by libtpu's own metrics: torch_xla reports none under SPMD."""

from __future__ import annotations

import importlib
import threading
from typing import Any

from tpukit.hardware.memory import Memory

METRICS = ("hbm_capacity_usage", "hbm_capacity_total")
SECONDS_BETWEEN_SAMPLES = 0.02
SECONDS_TO_ANSWER = 10.0
"""Time limit of the first sample: without its metadata server a library may try for long."""


def fullest_device() -> Memory | None:
    """Usage and limit of this process' fullest device; None where libtpu does not report them."""
    used, limits = (_metric(name) for name in METRICS)
    most, limit = max(zip(used, limits, strict=False), default=(0.0, 0.0))
    # An open device holds something: 0 is what a metric is before its first value.
    return Memory(int(most), int(most), int(limit) or None) if most else None


def duty_cycle_percent() -> int | None:
    """Part of the last seconds that this process' least busy chip worked; None: not reported."""
    found = _metric("duty_cycle_pct")
    return round(min(found)) if found else None


def _metric(name: str) -> list[float]:
    """A value a device; empty where libtpu does not report it."""
    try:
        metrics: Any = importlib.import_module("libtpu.sdk").tpumonitoring
        return [float(value) for value in metrics.get_metric(name).data()]
    except (
        AttributeError,
        ImportError,
        RuntimeError,
        TypeError,
        ValueError,
    ):  # another libtpu or Python
        return []


class SampledMemory:
    """Memory of the fullest device with its peak, which libtpu does not keep: a thread samples it.

    The thread starts with the first `read`.
    """

    def __init__(self) -> None:
        self._peak = 0
        self._answered, self._done = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def read(self) -> Memory | None:
        """Usage now, and the peak since `start_anew`; None where libtpu does not report them."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="tpu-memory", daemon=True)
            self._thread.start()
            if not self._answered.wait(SECONDS_TO_ANSWER):
                self.close()
        return None if self._done.is_set() else self._sample()

    @property
    def answers(self) -> bool:
        """Whether libtpu has reported something, and is asked on."""
        return self._answered.is_set() and not self._done.is_set()

    def start_anew(self) -> None:
        """The peak counts from here."""
        self._peak = 0

    def close(self) -> None:
        """Ends the samples: nothing is reported from here on."""
        self._done.set()

    def _watch(self) -> None:
        while not self._done.is_set():
            if self._sample() is None:
                self._done.set()
            self._answered.set()
            self._done.wait(SECONDS_BETWEEN_SAMPLES)

    def _sample(self) -> Memory | None:
        memory = fullest_device()
        if memory is None:
            return None
        self._peak = max(self._peak, memory.used)
        return Memory(memory.used, self._peak, memory.limit)
