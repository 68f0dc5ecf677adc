"""Launched ranks: their exit codes, output, signals, and ends."""

import os
import socket
import subprocess
import sys
import time

import psutil
import pytest
from runs import MARK, SUPPORT, environment, marked_processes, script

from tpukit.errors import HardwareError
from tpukit.hardware.launch.launcher import check_port

PATH = os.pathsep.join([str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])])


def start(scenario, mark="none"):
    """Launched in new processes."""
    return subprocess.Popen(
        [sys.executable, SUPPORT / "launched.py", scenario, "0"],
        env=environment({"PYTHONPATH": PATH, MARK: mark}),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def finish(process):
    out, stderr = process.communicate(timeout=120)
    return process.returncode, out, stderr


def launched(scenario, restarts=0):
    """Exit code and outputs of ranks, torchrun and its launcher that are forks."""
    done = script("launched.py", scenario, restarts, env={"PYTHONPATH": PATH})
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("how", [
    launched, pytest.param(lambda name: finish(start(name)), marks=pytest.mark.slow),
], ids=["forks", "new"])  # fmt: skip
def test_all_ranks_end_well(how):
    code, out, stderr = how("end")
    assert (code, out) == (0, "done 0 of 2\n"), stderr


def test_bad_input_is_printed_once_with_its_own_code():
    code, _, stderr = launched("bad-input")
    assert code == 2
    assert stderr.count("Error:") == 1
    assert "Traceback" not in stderr


@pytest.mark.parametrize("ended_first", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_of_ranks_that_make_the_same_mistake_one_says_it(ended_first):
    """Also where torchrun ends the other one before, or after, it has said it."""
    code, out, stderr = launched(f"both-fail-{ended_first}")
    assert (code, out, stderr) == (2, "{} 0\n", "Error: both\n  know\n")


def test_an_error_that_torchrun_leaves_to_one_rank_arrives():
    code, out, stderr = launched("both-fail-alone")
    assert (code, out) == (2, "{} 1\n")
    assert stderr == "[rank 1] Error: both\n[rank 1]   know\n"


def test_a_rank_that_fails_ends_while_the_others_wait_for_it():
    """Destroying the process group, which blocks here as on GPUs, is left out."""
    code, _, stderr = launched("second-raises")
    assert code == 2
    assert "rank 1: only the second knows" in stderr or "[rank 1] Error: only the" in stderr


@pytest.mark.slow
def test_a_rank_that_failed_is_restarted_with_the_others():
    code, out, stderr = launched("second-raises-once", restarts=1)
    assert (code, out) == (0, "done 0\n"), stderr


@pytest.mark.slow
def test_the_error_is_shown_while_another_rank_hangs():
    process = start("second-raises-beside-one-that-hangs")
    assert process.stderr.readline() == "[rank 1] Error: only the second knows\n"
    assert process.poll() is None, "torchrun waits before it kills a rank"
    process.kill()
    process.communicate(timeout=120)


def test_a_killed_rank_is_named():
    code, _, stderr = launched("second-is-killed")
    assert code == 1
    assert "rank 1 ended by SIGKILL" in stderr
    assert "Traceback" not in stderr


def test_sigkill_of_the_launcher_leaves_nothing_behind():
    mark = f"launch-{os.getpid()}-{time.monotonic_ns()}"
    process = start("wait-with-children", mark)
    assert process.stdout.readline() == "waiting 0\n", process.stderr.read()
    # The launcher, torchrun, two ranks, and their DataLoader workers.
    assert len(marked_processes(mark)) >= 6
    process.kill()
    process.communicate(timeout=60)
    _, alive = psutil.wait_procs(marked_processes(mark), timeout=30)
    assert alive == []


def test_a_busy_port_is_an_error():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        with pytest.raises(HardwareError, match="in use"):
            check_port(taken.getsockname()[1])


@pytest.mark.parametrize(
    ("options", "env", "stderr"),
    [
        pytest.param(
            ["tpu"],
            {"PJRT_DEVICE": "CPU"},
            "one process drives all devices",
            marks=pytest.mark.xla,
        ),
        (["cpu", "4"], {}, "started 2 ranks"),
    ],
)
def test_world_sizes_that_would_train_apart_are_refused(options, env, stderr):
    launcher = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", **env}
    done = script("opened.py", *options, env=launcher)
    assert stderr in done.stdout, done.stderr[-2000:]
