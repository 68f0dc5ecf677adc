"""Launched processes: their exit codes, their words, their signals, and their ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest
from runs import MARK, SUPPORT, environment, marked_processes

from tpukit.errors import HardwareError
from tpukit.hardware.launch.launcher import check_port

LAUNCH = """
import sys
from tpukit.errors import TpukitError
from tpukit.hardware.launch.launcher import launch
from tpukit.hardware.options import HardwareOptions
try:
    sys.exit(launch(sys.argv[1:], 2, HardwareOptions(hw="cpu", devices=2), module="rank_script"))
except TpukitError as error:
    print("Error:", error.message, file=sys.stderr)
    sys.exit(error.exit_code)
"""


def start(deed, mark="none"):
    paths = [str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])]
    extra = {"PYTHONPATH": os.pathsep.join(paths), MARK: mark}
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCH, deed],
        env=environment(extra), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def finish(process):
    out, told = process.communicate(timeout=120)
    return process.returncode, out, told


def test_all_is_well():
    code, out, told = finish(start("end"))
    assert (code, out) == (0, "done 0 of 2\n"), told


def test_bad_input_is_told_once_with_its_own_code():
    code, _, told = finish(start("bad-input"))
    assert code == 2
    assert told.count("Error:") == 1
    assert "Traceback" not in told


def test_an_error_of_the_second_process_alone_is_shown():
    code, _, told = finish(start("second-fails"))
    assert code == 2
    assert "[process 1] Error: only the second knows" in told


def test_a_killed_process_is_named():
    code, _, told = finish(start("second-is-killed"))
    assert code == 1
    assert "Process 1 ended by SIGKILL" in told
    assert "Traceback" not in told


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_are_passed_on_and_every_process_ends_in_order(number, code):
    process = start("wait")
    assert process.stdout.readline() == "waiting 0\n"
    time.sleep(1.0)  # the second process is on its way
    process.send_signal(number)
    ended, out, told = finish(process)
    assert ended == code, told
    assert "stopped 0" in out


def test_sigkill_of_the_launcher_leaves_nothing_behind():
    mark = f"launch-{os.getpid()}-{time.monotonic_ns()}"
    process = start("wait-with-children", mark)
    assert process.stdout.readline() == "waiting 0\n", process.stderr.read()
    # The launcher, torchrun, two processes, and their loaders.
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
    ("options", "env", "told"),
    [
        ("hw='tpu'", {"PJRT_DEVICE": "CPU"}, "one process drives all devices"),
        ("hw='cpu', devices=4", {}, "2 processes were started"),
    ],
)
def test_worlds_that_would_train_apart_are_refused(options, env, told):
    code = (
        "from tpukit.hardware.select import open_backend; from tpukit.errors import TpukitError\n"
        "from tpukit.hardware.options import HardwareOptions\n"
        f"try: open_backend(HardwareOptions({options}))\n"
        "except TpukitError as error: print(error.message, error.hint)"
    )
    launcher = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", **env}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(launcher), capture_output=True, text=True,
        check=False, timeout=120,
    )  # fmt: skip
    assert told in done.stdout, done.stderr[-2000:]
