"""Memory and load of a TPU's devices by libtpu's own metrics: torch_xla reports none under SPMD."""

import importlib
from typing import Any

from tpukit.hardware.memory import Memory

METRICS = ("hbm_capacity_usage", "hbm_capacity_total")


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
    except (AttributeError, ImportError, RuntimeError, TypeError, ValueError):
        return []  # another libtpu or Python
