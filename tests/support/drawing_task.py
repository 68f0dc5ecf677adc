"""Losses that draw from every generator, on data that do so too."""

import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import IterableDataset

from tpukit.train.task import Datasets, Task, TrainingDefaults


class Rows:
    """`count` samples with noise from the generators of the process."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        x = np.random.default_rng(index).standard_normal(8, dtype=np.float32)
        noise = random.random() + np.random.random() + float(torch.rand(()))
        return {"x": x, "noise": np.float32(noise)}


class Stream(IterableDataset):
    def __iter__(self):
        yield from map(Rows(10**6).__getitem__, range(10**6))


class Drawing(Task):
    """`noise` and the other metrics are what data and loss drew."""

    name = "drawing"
    defaults = TrainingDefaults(global_batch_size=16, max_steps=8, lr=0.01, rows_per_device=1024)

    def __init__(self, stream: bool = False, data_path: str = "") -> None:
        self.stream = stream

    def build_model(self, ops):
        return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 8))

    def datasets(self):
        return Datasets(Stream() if self.stream else Rows(64), None if self.stream else Rows(40))

    def loss(self, model, batch):
        x = batch["x"]
        host = torch.tensor([random.random() + np.random.random(), torch.rand(())]).to(x.device)
        drawn, after = torch.rand_like(x), torch.rand(()).to(x.device)
        return {
            "loss": (model(x + drawn) - drawn).square().mean(1),
            "noise": batch["noise"],
            "host": host.sum().expand(len(x)),
            "device": drawn.mean(1),
            "after": after.expand(len(x)),
        }
