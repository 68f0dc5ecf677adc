"""A child that answers, dies, hangs or leaves others behind: the parent always gets its answer."""

import os
import signal
import time
from pathlib import Path

import pytest
from runs import is_running, wait_until

from tpukit.hardware.launch.child import Child, ChildDiedError

CHATTER = """
import sys, time
while True:
    print("x" * 1000, flush=True)
    time.sleep(0.001)
"""
ECHO = """
import json, os, subprocess, sys, time
descriptor = int(sys.argv[-2])
for line in sys.stdin:
    asked = json.loads(line)
    print("heard", asked, flush=True)
    if asked["do"] == "hang":
        grandchild = subprocess.Popen(["sleep", "300"])
        print("grandchild", grandchild.pid, flush=True)
        time.sleep(300)
    if asked["do"] == "die":
        if asked.get("fork") and os.fork() == 0:
            time.sleep(300)
        os.kill(os.getpid(), asked["signal"])
    if asked["do"] == "exit":
        sys.exit(3)
    os.write(descriptor, json.dumps({"answer": asked["value"]}).encode() + b"\\n")
"""


@pytest.fixture
def child(tmp_path):
    with Child({}, ("-c", ECHO)) as process:
        yield process


def ask(child, question, seconds):
    child.send(question)
    return child.receive(time.monotonic() + seconds)


def open_descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def test_answers_come_back(child):
    for value in (1, "two" * 100_000):
        assert ask(child, {"do": "answer", "value": value}, 30) == {"answer": value}


def test_a_child_that_prints_for_ever_does_not_fill_the_disk(monkeypatch):
    monkeypatch.setattr("tpukit.hardware.launch.child.MOST_OUTPUT", 20_000)
    monkeypatch.setattr("tpukit.hardware.launch.child.SECONDS_BETWEEN_LOOKS", 0.02)
    with Child({}, ("-c", CHATTER)) as child:
        with pytest.raises(ChildDiedError) as caught:
            child.receive(time.monotonic() + 3)
        assert caught.value.death.return_code is None
        # Between two looks it writes some hundred lines; in three seconds it wrote thousands.
        assert os.fstat(child._output.fileno()).st_size < 600_000


def test_two_children_work_at_the_same_time():
    with Child({}, ("-c", ECHO)) as first, Child({}, ("-c", ECHO)) as second:
        deadline = time.monotonic() + 30
        for value, process in enumerate((first, second)):
            process.send({"do": "answer", "value": value})
        assert second.receive(deadline) == {"answer": 1}
        assert first.receive(deadline) == {"answer": 0}


def test_a_question_to_a_child_that_is_gone_is_answered_by_its_death(child):
    with pytest.raises(ChildDiedError):
        ask(child, {"do": "exit"}, 30)
    child.send({"do": "answer", "value": 1})
    with pytest.raises(ChildDiedError):
        child.receive(time.monotonic() + 30)


@pytest.mark.parametrize(
    ("how", "code"),
    [
        *(
            ({"do": "die", "signal": n}, -n)
            for n in (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT)
        ),
        ({"do": "die", "signal": signal.SIGKILL, "fork": True}, -signal.SIGKILL),
        ({"do": "exit"}, 3),
    ],
)
def test_a_death_is_named_though_a_grandchild_keeps_the_pipe_open(child, how, code):
    with pytest.raises(ChildDiedError) as caught:
        ask(child, how, 30)
    assert caught.value.death.return_code == code
    assert "heard" in caught.value.death.output


def test_a_hang_ends_in_time_and_takes_its_children_along(child):
    with pytest.raises(ChildDiedError) as caught:
        ask(child, {"do": "hang"}, 3)
    assert caught.value.death.return_code is None
    (line,) = [li for li in caught.value.death.output.splitlines() if "grandchild" in li]
    wait_until(lambda: not is_running(int(line.split()[1])), seconds=5)


def test_leaving_ends_the_child_and_closes_everything():
    before = open_descriptors()
    with Child({}, ("-c", ECHO)) as process:
        pid = process._process.pid
        assert is_running(pid)
    assert not is_running(pid)
    assert open_descriptors() == before


def test_a_child_that_is_done_ends_by_itself(tmp_path):
    """What holds a device gives it back in order."""
    marker = tmp_path / "given-back"
    leaving = f"{ECHO}\ntime.sleep(0.2)\nopen({str(marker)!r}, 'w').close()\n"
    with Child({}, ("-c", leaving)) as process:
        assert ask(process, {"do": "echo", "value": 1}, 30) == {"answer": 1}
        process.finish()
        assert marker.exists()


def test_a_child_that_does_not_end_is_ended(tmp_path):
    with Child({}, ("-c", f"{ECHO}\ntime.sleep(300)\n")) as process:
        process.finish(seconds=0.2)
        assert process.has_ended
