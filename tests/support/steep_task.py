"""A task whose loss is finite for every sample, but whose gradient is not for one of them."""

from dataclasses import replace

import numpy as np
import torch
from tiny_task import Rows, Tiny
from torch import nn

from tpukit.hardware.backend import AdamSettings
from tpukit.train.task import Datasets


class Scaled(Rows):
    """Rows with a factor that is 0 for the sample `bad`."""

    def __getitem__(self, index):
        scale = np.float32(index != self.bad)
        return {**Rows(self.count)[index], "scale": scale}


class Steep(Tiny):
    """A norm in the loss: that of 0 is 0, its derivative NaN."""

    name = "steep"

    def __init__(self, bad: int | None = None, data_path: str = "") -> None:
        super().__init__(samples=160, bad=bad)

    def identity(self):
        return {}

    def datasets(self):
        return Datasets(Scaled(self.samples, self.bad), Scaled(10))

    def loss(self, model, batch):
        found = model(batch["x"]).float()
        norm = (found * batch["scale"][:, None]).square().sum(1).sqrt()
        return {"loss": (found - batch["y"]).square().mean(1) + 0.1 * norm}

    def probe_batches(self, settings):
        [batch] = super().probe_batches(settings)
        return [{**batch, "scale": batch["x"][:, 0]}]


class Hinged(Steep):
    """The same by a branch that is not taken, in the head alone."""

    name = "hinged"

    def loss(self, model, batch):
        found = model(batch["x"]).float()
        norm = (model[-1].bias * batch["scale"][:, None]).square().sum(1).sqrt()
        return {"loss": (found - batch["y"]).square().mean(1) + 0.1 * norm}


class Exact(Steep):
    """An optimizer without eps, and a parameter whose gradient is 0."""

    name = "exact"
    defaults = replace(Tiny.defaults, adam=AdamSettings(eps=0.0))

    def build_model(self, ops):
        model = super().build_model(ops)
        model[0].register_parameter("unused", nn.Parameter(torch.ones(2)))
        return model

    def loss(self, model, batch):
        outputs = super().loss(model, batch)
        return {"loss": outputs["loss"] + 0 * model[0].unused.sum()}
