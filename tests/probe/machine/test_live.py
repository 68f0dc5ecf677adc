# ruff: noqa: E501 - a case is one line
"""The checks that start torch: they run here for real, and whatever hangs ends in its time limit."""

import time
from pathlib import Path

import psutil
import pytest
from recorded_host import RecordedHost

from tpukit.hardware.host import Host
from tpukit.probe.machine.facts import gather
from tpukit.probe.machine.live import STEPS, run_live_checks
from tpukit.probe.machine.verdict import CheckOptions

ANSWER = "import os, json, sys\ndef say(**a): os.write(int(sys.argv[-2]), (json.dumps(a) + '\\n').encode())\n"
FIRST = "say(message='torch 2')\n"
CHILDREN = {
    "never ends": "import time\ntime.sleep(1000)\n",
    "ignores signals": "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "signal.signal(signal.SIGINT, signal.SIG_IGN)\ntime.sleep(1000)\n",
}


def played(code: str, seconds: float = 1.5):
    """The results when the child runs this code instead of its own."""
    facts = gather(RecordedHost({"packages": {"torch": "2.9.0"}}), quick=True)
    command = ["-c", ANSWER + code]
    return list(run_live_checks(facts, CheckOptions(live_seconds=seconds), command))


@pytest.mark.parametrize("name", CHILDREN)
def test_child_that_hangs(name):
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    results = played(FIRST + CHILDREN[name])
    assert [r.id for r in results] == list(STEPS)
    assert [r.verdict.status for r in results] == ["pass", "fail", "skip", "skip"]
    assert "no answer within 1.5 s" in results[1].verdict.message
    assert {p.pid for p in psutil.Process().children(recursive=True)} <= before


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("os.kill(os.getpid(), 11)", "SIGSEGV"),
        ("import sys; sys.stderr.write(\"ImportError: _XLAC.so: undefined symbol: _ZN5\"); sys.exit(1)",
         "different versions"),
    ],
)  # fmt: skip
def test_child_that_crashes(code, said):
    results = played(FIRST + code + "\n", seconds=20)
    assert [r.verdict.status for r in results] == ["pass", "fail", "skip", "skip"]
    assert said in results[1].verdict.message


def test_the_checks_here():
    facts = gather(Host(), quick=True)
    results = list(run_live_checks(facts, CheckOptions(hw="cpu", live_seconds=200)))
    assert [r.verdict.status for r in results] == ["pass"] * 4, results
    assert "bf16 within" in results[2].verdict.message
    assert "loss" in results[3].verdict.message


@pytest.mark.slow
@pytest.mark.xla
def test_the_checks_on_virtual_devices(monkeypatch):
    pytest.importorskip("torch_xla")
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    monkeypatch.setenv("CPU_NUM_DEVICES", "4")
    facts = gather(Host(), quick=True)
    results = list(run_live_checks(facts, CheckOptions(hw="tpu", live_seconds=250)))
    assert [r.verdict.status for r in results] == ["pass"] * 4, results
    assert "4 devices" in results[1].verdict.message


@pytest.mark.slow
def test_a_device_that_is_not_here():
    facts = gather(Host(), quick=True)
    if facts.kind != "cpu":
        pytest.skip("there is one")
    results = list(run_live_checks(facts, CheckOptions(hw="gpu", live_seconds=200)))
    assert [r.verdict.status for r in results] == ["pass", "fail", "skip", "skip"]
    assert "GPU" in results[1].verdict.message


# -- the real host -----------------------------------------------------------------------------------
def test_program_that_hangs_or_is_not_there():
    host = Host()
    start = time.monotonic()
    assert host.run(["sleep", "1000"], 0.3) is None
    assert host.run(["no-such-program"], 1) is None
    assert host.run(["false"], 5) is None
    assert host.run(["echo", "a"], 5) == "a\n"
    assert time.monotonic() - start < 20


def test_server_that_does_not_answer():
    """A metadata server that takes the connection's time: the limit ends it."""
    host = Host()
    start = time.monotonic()
    assert not host.reaches("192.0.2.1", 80, 0.5)
    assert not host.reaches("no-such-host.invalid", 80, 0.5)
    assert time.monotonic() - start < 20


def test_real_host_answers_what_is_not_there():
    host = Host()
    assert host.read("/no/such/file") is None
    assert host.read("/") is None
    assert host.names("/no/such") == []
    assert host.link("/no/such") is None
    assert host.disk("/no/such/folder") is not None
    assert host.packages()["typer"]
    assert host.package_text("torch/version.py")
    assert Path("/proc/self").exists()
