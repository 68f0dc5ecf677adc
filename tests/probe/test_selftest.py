"""The self-test runs here for real: on the CPU, on virtual devices, and where a part dies."""

from collections.abc import Mapping

import pytest
import torch
from fake_backend import FakeBackend
from runs import SUPPORT, environment, last_json, result, script, tpukit

from tpukit.hardware.backend import DeviceUsage
from tpukit.hardware.detect import EMULATED_KERNELS
from tpukit.hardware.host import Host
from tpukit.probe.batch.search import SearchSettings
from tpukit.probe.machine import host_parts
from tpukit.probe.machine.device_parts import DeviceParts
from tpukit.probe.machine.facts import gather
from tpukit.probe.machine.selftest import OF_TASKS, PARTS, Part, run_selftest
from tpukit.probe.machine.verdict import CheckOptions
from tpukit.probe.targets import find_target
from tpukit.registry.declared import ClassSource

TWO = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2"}


def statuses(checks) -> dict[str, str]:
    return {check["id"]: check["status"] for check in checks}


SECONDS = 3000
"""Of a machine that is busy with other tests."""


def emulated(*parts: str, seconds: int = SECONDS, **variables: str) -> list[dict]:
    """These parts on two virtual devices."""
    words = ("tpu", seconds, *parts)
    env = {**TWO, **variables}
    return last_json(script("selftest_parts.py", *words, env=env, timeout=seconds))


def test_on_the_cpu_it_prints_a_report_and_its_json(tmp_path):
    home = {"HOME": str(tmp_path), "TPUKIT_CACHE_DIR": str(tmp_path / "cache")}
    words = ["--hw", "cpu", "--time-limit", SECONDS, "--json"]
    done = tpukit("doctor", "--selftest", *words, env=home, timeout=SECONDS)
    found = result(done)
    assert found["ok"]
    assert statuses(found["checks"]) == {
        "kernels": "skip", "devices": "pass", "products": "pass", "step-eit": "skip",
        "step-images": "skip", "step-llm": "skip", "generate": "pass", "train": "pass",
        "resume": "pass", "shard": "skip", "out-of-memory": "pass", "reopen": "skip",
        "prediction": "skip", "largest-batch": "skip",
    }  # fmt: skip
    [resume] = [check for check in found["checks"] if check["id"] == "resume"]
    assert resume["values"]["resumed_from"] in (5, 10, 15)
    # Progress with the time that is left, then the report, for people.
    assert "1/14 Attention kernels" in done.stderr
    assert "left in all)" in done.stderr
    assert "### tpukit" in done.stderr
    assert str(tmp_path) not in done.stderr


@pytest.mark.slow
@pytest.mark.xla
def test_virtual_devices_compute_what_the_cpu_does_and_compile_once(tmp_path):
    parts = ("devices", "products", "step-llm", "generate", "train")
    checks = emulated(*parts, TPUKIT_CACHE_DIR=str(tmp_path))
    assert statuses(checks) == dict.fromkeys(parts, "pass")
    values = {check["id"]: check["values"] for check in checks}
    assert values["devices"]["devices"] == 2
    assert values["step-llm"]["weights"] < 1e-4
    assert values["generate"] == {"first": 3, "second": 0}
    assert values["train"]["compilations"] > 0
    assert values["train"]["compilations_after_warmup"] == 0


class Compiling(FakeBackend):
    """Compiles a program for each read, reports no memory, and fails in its own words."""

    reads = 0

    def to_host(self, tensors):
        self.reads += 1
        if any(tensor.numel() > 2**40 for tensor in tensors.values()):
            raise RuntimeError("the chip is full")
        return super().to_host(tensors)

    def compilations(self):
        return self.reads

    def usage(self):
        return DeviceUsage(None)


def test_a_device_that_does_not_do_as_it_should_is_told_of():
    parts = DeviceParts("tpu")
    parts.__dict__["backend"] = Compiling()
    generated = parts.own("llm", "generate")
    assert generated["error"].endswith("8 compilations, then 8")
    assert "does not report its memory" in parts.devices()["warning"]


def test_an_unknown_text_for_a_full_device_fails(monkeypatch):
    monkeypatch.setattr(torch, "ones", lambda *sizes, **_: torch.empty(sizes, device="meta"))
    parts = DeviceParts("tpu")
    parts.__dict__["backend"] = Compiling()
    answer = parts.out_of_memory()
    assert answer["error"] == "not recognised: RuntimeError: the chip is full"


@pytest.mark.slow
@pytest.mark.xla
def test_virtual_devices_pass_every_part_that_they_have(tmp_path):
    names = [part.id for part in PARTS]
    checks = emulated(*names, TPUKIT_CACHE_DIR=str(tmp_path), **{EMULATED_KERNELS: "1"})
    expected = {**dict.fromkeys(names, "pass"), "prediction": "skip", "largest-batch": "skip"}
    assert statuses(checks) == expected, checks


@pytest.mark.slow
@pytest.mark.xla
def test_broken_kernels_fail_their_part_alone(tmp_path):
    path = f"{SUPPORT / 'broken_kernels'}:{environment().get('PYTHONPATH', '')}"
    broken = {"PYTHONPATH": path, "BROKEN_KERNELS": "differs", EMULATED_KERNELS: "1"}
    kernels, products = emulated("kernels", "products", TPUKIT_CACHE_DIR=str(tmp_path), **broken)
    assert kernels["status"] == "fail"
    assert "attention: output differs by" in kernels["message"]
    assert products["status"] == "pass"


def test_a_part_that_dies_or_hangs_is_a_line_of_the_report():
    dies, hangs, works = last_json(
        script("selftest_parts.py", "cpu", 500, "dies", "hangs", "works")
    )
    assert dies["status"] == "fail" and "SIGKILL" in dies["message"]
    assert hangs["status"] == "fail" and "no answer within 1 s" in hangs["message"]
    assert works["status"] == "pass"


def test_what_tasks_declare_for_it_can_be_read_from_their_source():
    assert all(isinstance(given, Mapping | ClassSource) for _, given in OF_TASKS.values())


def test_no_time_left_is_a_skip():
    parts = (Part("late", "A part when time is up", 60, lambda bench: bench.run("device", "x")),)
    [late] = run_selftest(
        gather(Host(), quick=True), CheckOptions(hw="cpu", live_seconds=0.5), lambda _: None, parts
    )
    assert late.verdict.status == "skip"
    assert "--time-limit" in late.verdict.message


@pytest.fixture
def on_a_v5e(tmp_path, monkeypatch):
    """The parts on a CPU that stands in for a TPU."""
    monkeypatch.setenv("TPUKIT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(host_parts, "target_here", lambda _: find_target("v5e-1"))
    return host_parts.HostParts("cpu")


@pytest.mark.plan
@pytest.mark.slow
def test_what_is_measured_stands_beside_the_prediction(on_a_v5e):
    answer = on_a_v5e.prediction("eit", {"size": "tiny"}, 8)
    assert answer["values"]["predicted"]["target"] == "v5e-1"
    assert answer["values"]["used_bytes"] > 0
    assert "measured" in answer["message"]
    assert "predicted" in answer["message"]


@pytest.mark.plan
@pytest.mark.slow
def test_the_batch_that_the_compiler_names_is_tried(on_a_v5e, monkeypatch):
    monkeypatch.setattr(host_parts, "SearchSettings", lambda **_: SearchSettings(start=2, max=2))
    answer = on_a_v5e.largest(f"{SUPPORT / 'probe_tasks.py'}:Hungry", {})
    assert answer["message"] == "named 2 a device: 2 fits"
    assert answer["values"]["2"]["used_bytes"] > 0
    assert "warning" not in answer
