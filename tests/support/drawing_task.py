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


class NoisySGD(torch.optim.SGD):
    """Langevin dynamics: noise in each step."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for parameter in (p for group in self.param_groups for p in group["params"]):
            parameter.add_(torch.randn_like(parameter), alpha=0.01)


class Projecting(nn.Module):
    """A random projection that is no buffer."""

    def __init__(self):
        super().__init__()
        self.projection, self.head = torch.randn(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.head((x @ self.projection.to(x.device)).sin())


class Redrawing(Drawing):
    """Draws in its model, in the optimizer's step and in `after_step`, where ranks compare."""

    name = "redrawing"

    def build_model(self, ops):
        return Projecting()

    def build_optimizer(self, groups, settings):
        return NoisySGD(groups, settings.lr)

    def loss(self, model, batch):
        return {"loss": (model(batch["x"]) - batch["x"]).square().mean(1)}

    def after_step(self, model):
        model.head.weight[random.randrange(8)] = np.random.random() * torch.rand(16)
        weights = [torch.zeros_like(model.head.weight) for _ in range(2)]
        torch.distributed.all_gather(weights, model.head.weight.detach())
        if not torch.equal(*weights):
            raise ValueError("the ranks drew different weights")


class Observing(Drawing):
    """Buffers that each pass moves, in eval mode too: a mean in place, a count made anew."""

    name = "observing"

    def build_model(self, ops):
        model = nn.Linear(8, 8)
        model.register_buffer("mean", torch.zeros(8))
        model.register_buffer("passes", torch.zeros(()))
        return model

    def loss(self, model, batch):
        with torch.no_grad():
            model.mean.lerp_(batch["x"].mean(0), 0.5)
            model.passes = model.passes + 1
        x = (batch["x"] - model.mean) / model.passes.sqrt()
        return {"loss": (model(x) - batch["x"]).square().mean(1)}
