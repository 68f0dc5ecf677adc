"""A full /dev/shm ends a run that has DataLoader workers, and is named."""

import errno
import subprocess
import sys

import pytest
from runs import environment

from tpukit.errors import JobError
from tpukit.train import data
from tpukit.train.data import lack_of_room_named, put_in_shared_memory

TASK = """
import numpy as np, time
from torch import nn
from tpukit.train.task import Datasets, Task, TrainingDefaults

class Large(Task):
    name = "large"
    defaults = TrainingDefaults(
        global_batch_size=4, max_steps=2000, lr=1e-3)
    def build_model(self, ops):
        return nn.Linear(4, 1)
    def datasets(self):
        return Datasets([{"x": np.zeros(100_000, np.float32)} for _ in range(8)], None)
    def loss(self, model, batch):
        time.sleep(0.05)
        return {"loss": model(batch["x"][:, :4]).square().mean(1)}
"""
FILLED_MEANWHILE = """
mount -t tmpfs -o size=32m tmpfs /dev/shm
"$@" & RUN=$!
until grep -q "step 3" run/log.txt 2>/dev/null; do kill -0 $RUN || exit; sleep 0.2; done
dd if=/dev/zero of=/dev/shm/fill bs=1k 2>/dev/null
wait $RUN
"""


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("unable to write to file </torch_12_3_4>: No space left on device (28)"),
        RuntimeError("unable to allocate shared memory(shm) for file </torch_1_2>: Cannot (12)"),
        OSError(errno.ENOSPC, "No space left on device"),  # a semaphore: it has no file
    ],
)
def test_what_torch_raises_without_room_names_the_shared_memory(error):
    said = r"shared memory .* is full: /dev/shm \("
    with pytest.raises(JobError, match=said) as told, lack_of_room_named():
        raise error
    assert told.value.id == "shared-memory" and "--num-workers" in told.value.hint


def test_a_full_disk_is_another_cause():
    with pytest.raises(OSError, match="No space") as told, lack_of_room_named():
        raise OSError(errno.ENOSPC, "No space left on device", "/data/x")
    assert not isinstance(told.value, JobError)


@pytest.mark.parametrize(("little", "name"), [(0, "loader-timeout"), (2**62, "shared-memory")])
def test_a_batch_that_never_comes_names_the_likely_cause(monkeypatch, little, name):
    monkeypatch.setattr(data, "LITTLE_BYTES", little)
    with pytest.raises(JobError) as told, lack_of_room_named():
        raise RuntimeError("DataLoader timed out after 600 seconds")
    assert told.value.id == name


def test_a_worker_raises_where_there_is_no_room():
    class Full:
        def share_memory_(self):
            raise RuntimeError("unable to write to file </torch_1>: No space left on device (28)")

    with pytest.raises(JobError, match="shared memory"):
        put_in_shared_memory([Full()])


@pytest.mark.slow
def test_a_shared_memory_that_fills_up_ends_the_run(tmp_path):
    if subprocess.run(["unshare", "-m", "true"], check=False).returncode:
        pytest.skip("mounting is not permitted here")
    (tmp_path / "large.py").write_text(TASK)
    done = subprocess.run(
        ["unshare", "-m", "bash", "-c", FILLED_MEANWHILE, "bash", sys.executable, "-m", "tpukit",
         "train", "--task", "large.py:Large", "--hw", "cpu", "--num-workers", "2",
         "--results-dir", "run", "--log-every", "1"],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "/dev/shm" in done.stderr and "Large." not in done.stderr, done.stderr


STARTED = """
import os, subprocess
from tpukit.train.loader import MicroBatchLoader
for size in ("4k", "8k", "16k"):
    subprocess.run(["mount", "-o", f"remount,size={size}", "/dev/shm"], check=True)
    if os.fork() == 0:
        iter(MicroBatchLoader([1], num_workers=2))
        break
    os.wait()
"""


@pytest.mark.slow
def test_workers_that_cannot_be_started_leave_one_error():
    """torch's iterator is half built then, and Python would print what its end raises."""
    mounted = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mounted, "sh", sys.executable, "-c", STARTED],
        env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "tpukit" not in done.stderr:
        pytest.skip(f"mounting is not permitted here: {done.stderr}")
    assert done.stderr.count("JobError: the shared memory") == 3, done.stderr
    assert "ignored" not in done.stderr
