"""Work over several cores: order, errors, killed workers, killed parents."""

import subprocess
import sys

import pytest
from runs import is_running, wait_until
from squares import work

from tpukit.errors import JobError
from tpukit.io.workers import map_ordered


def test_results_come_in_the_order_of_the_items():
    assert list(map_ordered(work, [0, 5, 6, 7, 8, 9], 2)) == [0, 25, 36, 49, 64, 81]


def test_an_error_in_the_function_is_raised_here():
    with pytest.raises(ValueError, match="three"):
        list(map_ordered(work, [1, 3], 2))


def test_a_killed_worker_is_a_job_error():
    with pytest.raises(JobError) as caught:
        list(map_ordered(work, [-1, 1], 1))
    assert caught.value.id == "worker-died" and "fewer workers" in caught.value.hint


PARENT = """
import os, sys, time
from tpukit.io.workers import worker_pool
if __name__ == "__main__":
    with worker_pool(1) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        pool.submit(time.sleep, 60).result()
"""


def test_workers_end_with_a_killed_parent(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    worker = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    wait_until(lambda: not is_running(worker), seconds=10)


HANGING = """
import multiprocessing, signal, time
from tpukit.io.process import WorkerInit

def hang(sender):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sender.send(0)
    time.sleep(600)

WorkerInit()
receiver, sender = multiprocessing.Pipe(duplex=False)
multiprocessing.Process(target=hang, args=(sender,), daemon=True).start()
receiver.recv()
"""


def test_no_process_waits_at_its_end_for_a_worker_that_hangs():
    subprocess.run([sys.executable, "-c", HANGING], timeout=60, check=True)
