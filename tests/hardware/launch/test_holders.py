"""A device that an ended process gives back late is waited for, and tried again."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tpukit.errors import HardwareError, JobError
from tpukit.hardware.host import Host
from tpukit.hardware.launch.child import Child
from tpukit.hardware.launch.holders import busy_named, wait_until_free
from tpukit.probe.trial import TaskSource, Trial, TrialRequest
from tpukit.probe.trials import evaluators
from tpukit.probe.trials.evaluators import MeasuredEvaluator
from tpukit.train.config import TrainConfig

OWNER = """
import fcntl, json, os, sys, time
from tpukit.hardware.host import Host
from tpukit.hardware.launch.holders import wait_until_free
path, descriptor = sys.argv[1], int(sys.argv[2])
wait_until_free(Host(), [path])
file, answer = open(path), "opened"
try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    answer = "Device or resource busy"
owner, (ready, started) = os.getpid(), os.pipe()
if os.fork() == 0:
    # In the driver's place: it lets go three seconds after the process has ended.
    os.setsid()
    os.close(descriptor)
    os.write(started, b"1")
    while os.getppid() == owner:
        time.sleep(0.01)
    time.sleep(3)
    os._exit(0)
os.read(ready, 1)
os.write(descriptor, json.dumps({"answer": answer}).encode() + b"\\n")
time.sleep(300)
"""


@pytest.fixture
def device(tmp_path):
    path = tmp_path / "accel0"
    path.touch()
    return str(path)


def test_a_device_that_is_freed_late_is_waited_for(device):
    for _ in range(2):
        with Child({}, ("-c", OWNER, device)) as child:
            assert child.receive(time.monotonic() + 60) == {"answer": "opened"}


def test_a_device_that_stays_held_is_not_waited_for_for_ever(device, capsys):
    code = f"import time; f = open({device!r}); print('open', flush=True); time.sleep(300)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"open\n"
        wait_until_free(Host(), [device], seconds=0.2)
        holder.kill()
    assert f"for process {holder.pid} (" in capsys.readouterr().err


def test_what_this_process_or_its_parent_holds_is_not_waited_for(device, capsys):
    with Path(device).open():
        wait_until_free(Host(), [device])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("text", [
    "TPU initialization failed: open(/dev/vfio/0): Device or resource busy",
    "The TPU is already in use by process with pid 12",
])  # fmt: skip
def test_a_busy_tpu_is_an_error_with_a_way_on(text):
    with pytest.raises(HardwareError) as caught, busy_named():
        raise RuntimeError(text)
    assert "--kernels off" in caught.value.hint
    with pytest.raises(RuntimeError, match="another"), busy_named():
        raise RuntimeError("another")


def test_the_search_tries_a_busy_device_again_in_a_new_process(monkeypatch):
    answers = [JobError("--hw tpu: the TPU is busy; ..."), Trial(2, fits=True)]

    def evaluate(self, request):
        answer = answers.pop(0)
        if isinstance(answer, JobError):
            raise answer
        return answer

    monkeypatch.setattr(evaluators, "PAUSES", (0.0,))
    monkeypatch.setattr(evaluators.ChildEvaluator, "evaluate", evaluate)
    with MeasuredEvaluator(TaskSource("", {}), TrainConfig(hw="cpu"), None) as evaluator:
        trial = evaluator.evaluate(TrialRequest(2))
    assert trial.fits
    assert answers == []
