"""Locks end with their process, however it ends."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from tpukit.io import lock
from tpukit.io.lock import LockedError, exclusive, wait_for_ending_owner

ENDING = """
import sys, time
from pathlib import Path
from tpukit.io.lock import exclusive, mark_ending
with exclusive(Path(sys.argv[1])):
    mark_ending(Path(sys.argv[1]))
    print("held", flush=True)
    time.sleep(1)
"""
HOLDING = """
import sys, time
from pathlib import Path
from tpukit.io.lock import exclusive
with exclusive(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def holder(path, code=HOLDING, **variables):
    """A process that holds the lock when this returns."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **variables},
    )
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_process_is_refused_and_the_owner_named_until_it_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "DYING_SECONDS", 0.1)
    process = holder(tmp_path / ".lock")
    try:
        with pytest.raises(LockedError) as caught, exclusive(tmp_path / ".lock"):
            pass
        assert caught.value.owner == process.pid
    finally:
        process.kill()
        process.wait()
    with exclusive(tmp_path / ".lock"):
        pass


@pytest.fixture
def orphaned(tmp_path):
    """A lock that a child of a dead owner still holds, as a DataLoader worker does for a moment."""
    path = tmp_path / ".lock"
    dead = subprocess.Popen(["true"])
    dead.wait()
    path.with_name(".lock.owner").write_text(str(dead.pid))
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield path, file


def test_the_children_of_a_killed_owner_are_waited_for(orphaned):
    path, file = orphaned
    threading.Timer(0.5, fcntl.flock, (file, fcntl.LOCK_UN)).start()
    with exclusive(path):
        assert json.loads(path.with_name(".lock.owner").read_text())["process"] == os.getpid()


def test_an_owner_that_is_about_to_end_is_waited_for(tmp_path):
    """As a run whose terminal closes: for a moment it is alive and holds the lock."""
    process = holder(tmp_path / ".lock")
    threading.Timer(0.5, process.kill).start()
    with exclusive(tmp_path / ".lock"):
        assert process.wait()


def test_children_that_do_not_end_are_not_waited_for_forever(orphaned, monkeypatch):
    monkeypatch.setattr(lock, "DYING_SECONDS", 0.3)
    started = time.monotonic()
    with pytest.raises(LockedError), exclusive(orphaned[0]):
        pass
    assert 0.3 <= time.monotonic() - started < 5


def test_waiting_says_so_once_and_ends_with_the_owner(tmp_path):
    process = holder(tmp_path / ".lock")
    threading.Timer(0.5, process.kill).start()
    said = []
    with exclusive(tmp_path / ".lock", wait=True, on_wait=lambda: said.append(1)):
        assert process.wait() and said == [1]


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError), exclusive(tmp_path / "file" / ".lock"):
        pass


def test_an_owner_that_was_asked_to_end_is_waited_for(tmp_path):
    waited_for = []
    process = holder(tmp_path / ".lock", ENDING)
    wait_for_ending_owner(tmp_path / ".lock", waited_for.append)
    assert waited_for == [process.pid] and process.wait() == 0


def test_an_owner_whose_cell_was_interrupted_is_about_to_end(tmp_path):
    cell = subprocess.Popen(["sleep", "60"])
    process = holder(tmp_path / ".lock", TPUKIT_FOLLOWER=str(cell.pid))
    waited_for = []
    wait_for_ending_owner(tmp_path / ".lock", waited_for.append)
    assert waited_for == []
    cell.kill()
    cell.wait()
    process.send_signal(signal.SIGTERM)  # it ends as a run does then
    wait_for_ending_owner(tmp_path / ".lock", waited_for.append)
    assert set(waited_for) <= {process.pid}
    process.wait()
