"""Memory of a TPU by libtpu's metrics, which a module in its place gives here."""

import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest

from tpukit.hardware import memory as hardware_memory
from tpukit.hardware.memory import Memory, SampledMemory
from tpukit.hardware.xla.tpu_memory import duty_cycle_percent, fullest_device

GIB = 2**30


@pytest.fixture
def metrics(monkeypatch):
    """Values by metric, as libtpu's module gives them: one a device, texts or numbers."""
    values = {"hbm_capacity_usage": [], "hbm_capacity_total": []}
    sdk, package = ModuleType("libtpu.sdk"), ModuleType("libtpu")
    package.sdk = sdk
    sdk.tpumonitoring = SimpleNamespace(
        get_metric=lambda name: SimpleNamespace(data=lambda: list(values[name]))
    )
    monkeypatch.setitem(sys.modules, "libtpu", package)
    monkeypatch.setitem(sys.modules, "libtpu.sdk", sdk)
    return values


@pytest.mark.parametrize("as_text", [str, float])
def test_the_fullest_device_counts(metrics, as_text):
    metrics["hbm_capacity_usage"] = [as_text(n * GIB) for n in (1, 3, 2)]
    metrics["hbm_capacity_total"] = [as_text(16 * GIB)] * 3
    assert fullest_device() == Memory(3 * GIB, 3 * GIB, 16 * GIB)


@pytest.mark.parametrize("values", [[], ["0", "0"], ["unknown"]])
def test_what_libtpu_does_not_know_is_unknown(metrics, values):
    metrics["hbm_capacity_usage"], metrics["hbm_capacity_total"] = values, [16 * GIB] * len(values)
    assert fullest_device() is None
    assert SampledMemory(fullest_device, 0.02).read() is None


def test_the_least_busy_chip_is_the_load(metrics):
    metrics["duty_cycle_pct"] = ["81.20", "79.60"]
    assert duty_cycle_percent() == 80


def test_without_libtpu_memory_is_unknown(monkeypatch):
    monkeypatch.setitem(sys.modules, "libtpu", None)
    assert fullest_device() is None
    assert duty_cycle_percent() is None


def test_a_peak_between_two_reads_is_seen():
    used, sampled = [2 * GIB], threading.Event()

    def read():
        if used[0] == 9 * GIB:
            sampled.set()
        return Memory(used[0], used[0], 16 * GIB)

    memory = SampledMemory(read, 0.02)
    try:
        assert memory.read() == Memory(2 * GIB, 2 * GIB, 16 * GIB)
        used[0] = 9 * GIB
        assert sampled.wait(30)
        threading.Event().wait(0.04)
        used[0] = 3 * GIB
        assert memory.read() == Memory(3 * GIB, 9 * GIB, 16 * GIB)
        memory.start_anew(0.02)
        assert memory.read().peak < 9 * GIB
    finally:
        memory.close()


def test_a_library_that_does_not_answer_is_left_alone(monkeypatch):
    monkeypatch.setattr(hardware_memory, "SECONDS_TO_ANSWER", 0.1)
    hangs = threading.Event()
    memory = SampledMemory(lambda: hangs.wait() and None, 0.02)
    assert memory.read() is None
    hangs.set()
    assert memory.read() is None
