"""DataLoader workers end with their run, and make the same batches."""

import subprocess

import numpy as np
import torch
from runs import python

from tpukit.io.process import WorkerInit
from tpukit.train.loader import LoaderSettings, make_loader
from tpukit.train.task import MicroBatch, SampleKey, stack_samples


class Task:
    def draw(self, sample, rng):
        return {**sample, "drawn": rng.standard_normal(4, dtype=np.float32)}

    def collate(self, samples, micro):
        return stack_samples(samples, micro.rows)


def test_batches_are_the_same_from_another_process():
    data = [{"x": np.full((2, 3), i, np.float32)} for i in range(5)]
    micro = [MicroBatch(tuple(SampleKey(1, i) for i in range(s, s + 2)), 3) for s in range(3)]
    here = list(make_loader(Task(), data, micro, LoaderSettings(0, 7)))
    there = list(make_loader(Task(), data, micro, LoaderSettings(1, 7, WorkerInit())))
    assert len(here) == len(there) == 3
    for one, other in zip(here, there, strict=True):
        assert one["mask"].tolist() == [1, 1, 0] and one["x"].shape == (3, 2, 3)
        assert all(torch.equal(one[name], other[name]) for name in one)


LEFT_ALONE = """
import time
from multiprocessing import connection, process, resource_sharer
from tpukit.io.process import WorkerInit
WorkerInit()(0)
address, key = resource_sharer.DupFd(0)._id
connection.Client(address, authkey=process.current_process().authkey).close()
time.sleep(0.5)
"""


def test_a_worker_whose_tensors_are_not_fetched_is_silent():
    """The main process stops: the thread that hands tensors over would print a traceback."""
    done = python("-c", LEFT_ALONE, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stderr) == (0, "")
