"""Verdicts, and the classification of a failure's text or a process' end."""

import signal
import threading

import psutil
import pytest

from tpukit.errors import JobError
from tpukit.hardware.launch.child import Child, Death
from tpukit.io.units import GIB
from tpukit.probe.compiler.hlo import requested_and_limit
from tpukit.probe.targets import find_target
from tpukit.probe.trial import TaskSource, Trial, TrialRequest
from tpukit.probe.trials.evaluators import ChildEvaluator, CompilerEvaluator, MeasuredEvaluator
from tpukit.train.config import TrainConfig


@pytest.mark.parametrize(
    ("used", "expected"),
    [(3.9, "grow"), (4.1, "fine"), (8.0, "fine"), (8.1, "near"), (15.9, "near")],
)
def test_the_verdict_is_a_share_of_the_memory(used, expected):
    assert Trial(4, True, int(used * GIB), 16 * GIB).verdict == expected


def test_what_does_not_fit_is_over_and_unknown_memory_is_fine():
    assert Trial(4, False, 3 * GIB, 16 * GIB).verdict == "over"
    assert Trial(4, True).verdict == "fine"


@pytest.mark.parametrize(
    ("text", "wanted", "limit"),
    [
        (
            "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory "
            "space hbm. Used 21.84G of 15.75G hbm. Exceeded hbm capacity by 6.10G.",
            21.84,
            15.75,
        ),
        ("Allocation (size=34359738368) would exceed memory (size=17179869184) :: x", 32, 16),
        ("CompileTimeHbmOom: memory (1.00T) exceeds available HBM (15.75G)", 1024, 15.75),
    ],
)
def test_the_three_forms_of_an_out_of_memory_message(text, wanted, limit):
    assert requested_and_limit(text) == (int(wanted * GIB), int(limit * GIB))
    assert Death(1, text).is_out_of_memory(limited=False)


def test_a_message_without_sizes():
    assert requested_and_limit("DefaultCPUAllocator: can't allocate memory") == (None, None)


@pytest.mark.parametrize(
    ("code", "output", "limited", "expected"),
    [
        (None, "", False, True),
        (-signal.SIGKILL, "", False, True),
        (137, "", False, True),
        (-signal.SIGABRT, "terminate called after throwing 'std::bad_alloc'", False, True),
        (-signal.SIGABRT, "assertion failed", False, False),
        (-signal.SIGABRT, "assertion failed", True, True),
        (-signal.SIGSEGV, "", True, True),
        (-signal.SIGSEGV, "", False, False),
        (1, "TypeError: wrong", True, False),
    ],
)
def test_how_a_process_ended(code, output, limited, expected):
    assert Death(code, output).is_out_of_memory(limited=limited) is expected


def test_a_death_is_described_by_its_signal():
    assert Death(-11, "").describe() == "ended by SIGSEGV"
    assert Death(134, "").describe() == "ended by SIGABRT"
    assert Death(3, "").describe() == "ended with exit code 3"
    assert "time limit" in Death(None, "").describe()


CRASH = """loading
Aborting: bad shape
Fatal Python error: Segmentation fault

Current thread 0x00007f (most recent call first):
  File "/env/lib/python3.11/site-packages/torch/nn/functional.py", line 12 in relu
  File "/home/user/model.py", line 7 in forward
  File "/home/user/main.py", line 3 in main
"""


def test_a_crash_names_the_models_line_and_the_last_message():
    evaluator = MeasuredEvaluator(TaskSource("", {}), TrainConfig(hw="cpu"), None)
    said = str(evaluator._failure(TrialRequest(4), Death(-11, CRASH)))
    assert "ended by SIGSEGV at /home/user/model.py:7. Its last message: Aborting: bad" in said
    assert "ended by SIGSEGV." in str(evaluator._failure(TrialRequest(4), Death(-11, "")))


@pytest.mark.plan
def test_a_compiler_that_is_killed_is_no_batch_too_large():
    """It runs on this machine: what the system kills says nothing about the TPU's memory."""
    nothing = TaskSource("none:none", {})
    with CompilerEvaluator(nothing, TrainConfig(), find_target("v5e-8"), None) as evaluator:
        evaluator._child = Child({}, ("-c", SLEEPING))
        threading.Timer(0.5, evaluator._child._process.kill).start()
        with pytest.raises(JobError, match=r"batch 8: .* ended by SIGKILL") as caught:
            evaluator.evaluate(TrialRequest(8))
    assert caught.value.id == "compiler-killed" and "dmesg" in caught.value.hint


SLEEPING = "import time; time.sleep(300)"
LACKING = """
import sys
print("Error: out of memory: 1.00 GiB of 2.00 GiB are available, 0.5 stay.\\nTry.")
sys.exit(1)
"""


@pytest.mark.plan
def test_a_compiler_without_memory_on_this_machine_says_so(monkeypatch):
    monkeypatch.setattr(CompilerEvaluator, "_start_child", lambda self: Child({}, ("-c", LACKING)))
    evaluator = CompilerEvaluator(TaskSource("", {}), TrainConfig(), find_target("v5e-8"), None)
    with pytest.raises(JobError, match=r"batch 8: .* full effort .* 1.00 GiB") as caught:
        evaluator.evaluate(TrialRequest(8, effort="full"))
    assert caught.value.id == "compiler-memory" and "--max" in caught.value.hint


NAMED = """
import json, os, sys
descriptor = int(sys.argv[1])
for line in sys.stdin:
    batch = json.loads(line)["batch"]
    trial = {"batch": batch, "fits": True, "unread": batch == 8, "used_bytes": os.getpid()}
    open(descriptor, "w", closefd=False).write(json.dumps({"trial": trial}) + "\\n")
"""


@pytest.fixture
def processes(monkeypatch):
    """The process of each of four trials."""
    monkeypatch.setattr(ChildEvaluator, "_start_child", lambda self: Child({}, ("-c", NAMED)))

    def run(evaluator):
        with evaluator:
            return [evaluator.evaluate(TrialRequest(n)).used_bytes for n in (4, 8, 16, 20)]

    return run


@pytest.mark.plan
def test_a_process_that_could_not_read_a_program_is_replaced(processes, monkeypatch):
    """What it had read of the text stays in its memory."""
    evaluator = CompilerEvaluator(TaskSource("", {}), TrainConfig(), find_target("v5e-8"), None)
    first, second, third, fourth = processes(evaluator)
    assert first == second != third == fourth


@pytest.mark.parametrize("on_cpu", [True, False])
def test_each_measured_trial_has_a_process_of_its_own(on_cpu, processes):
    evaluator = MeasuredEvaluator(TaskSource("", {}), TrainConfig(hw="cpu"), None)
    evaluator.on_cpu = on_cpu
    used = processes(evaluator)
    assert len(set(used)) == 4
    assert not any(psutil.pid_exists(process) for process in used)


@pytest.mark.parametrize(("compiles", "seconds"), [(None, 600), (True, 1800)])
def test_a_trial_that_compiles_may_take_longer(compiles, seconds):
    config = TrainConfig(hw="cpu", compile=compiles)
    assert MeasuredEvaluator(TaskSource("", {}), config, None).seconds == seconds
