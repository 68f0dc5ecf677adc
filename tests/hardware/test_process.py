"""Processes that load batches: lent cores that the step does not need."""

import os

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from tpukit.hardware.process import LOADING_NICENESS, WorkerInit
from tpukit.train.loader import LoaderSettings, make_loader
from tpukit.train.task import MicroBatch, SampleKey, stack_samples


class Niceness(Dataset):
    def __getitem__(self, index):
        return os.getpriority(os.PRIO_PROCESS, 0)

    def __len__(self):
        return 2


def test_loading_gives_way_to_the_step():
    own = os.getpriority(os.PRIO_PROCESS, 0)
    loader = DataLoader(Niceness(), num_workers=1, batch_size=None, worker_init_fn=WorkerInit())
    assert list(loader) == [own + LOADING_NICENESS] * 2


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
