"""Tasks whose steps depend on Python beside the tensors, for `on_torch_tpu.py` and
`recorded_steps.py`."""

import sys

import numpy as np
import torch
from torch import nn

import tpukit
from tpukit.train.config import TrainConfig
from tpukit.train.learner import build_learner

STEPS = 8


class Plain(tpukit.Task):
    """A regression; `before` is called before each step."""

    def build_model(self, ops):
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def datasets(self):
        raise NotImplementedError

    def loss(self, model, batch):
        return {"loss": self.factor() * (model(batch["x"]) - batch["y"]).square().mean(1)}

    def factor(self):
        return 1.0

    def before(self, step, model):
        pass


class Settings(Plain):
    """A dict, an object and a new attribute change once."""

    def __init__(self):
        super().__init__()
        self.by_name = {"loss": 1.0}

    def factor(self):
        return self.by_name["loss"] * getattr(self, "later", 1.0)

    def before(self, step, model):
        if step == 4:
            self.by_name["loss"], self.later = 3.0, 0.5


class Rises(Plain):
    """A number is another one in each step."""

    def before(self, step, model):
        self.alpha = 1.0 + step

    def factor(self):
        return self.alpha


class Counts(Plain):
    """Counts its own calls."""

    def __init__(self):
        super().__init__()
        self.calls = [0]

    def factor(self):
        self.calls[0] += 1
        return 1.0 if self.calls[0] < 5 else 3.0


class Draws(Plain):
    """Draws one bit, the same in both recordings perhaps."""

    def __init__(self):
        super().__init__()
        self.rng = np.random.default_rng(5)

    def factor(self):
        return 1.0 if self.rng.random() < 0.5 else 3.0


class Keeps(Plain):
    """Keeps a tensor for the next step."""

    center = None

    def loss(self, model, batch):
        outputs = model(batch["x"])
        mean = outputs.detach().mean(0)
        self.center = mean if self.center is None else 0.9 * self.center + 0.1 * mean
        return {"loss": (outputs - self.center - batch["y"]).square().mean(1)}


class Freezes(Plain):
    """A layer is frozen."""

    def before(self, step, model):
        if step == 4:
            model[0].requires_grad_(False)


class ReplacesData(Plain):
    """Weights are clipped by `.data`."""

    def loss(self, model, batch):
        for parameter in model.parameters():
            parameter.data = parameter.data.clamp(-0.2, 0.2)
        return super().loss(model, batch)


class HooksGradient(Plain):
    """A weight's gradient is masked."""

    def build_model(self, ops):
        model = super().build_model(ops)
        model[0].weight.register_hook(lambda gradient: gradient * torch.eye(8, 6).to(gradient))
        return model


class Imports(Plain):
    """Its first step imports a module that draws."""

    def build_model(self, ops):
        sys.modules.pop("draws_when_imported", None)
        return super().build_model(ops)

    def loss(self, model, batch):
        import draws_when_imported  # noqa: F401

        return super().loss(model, batch)


TASKS = (Settings, Rises, Counts, Draws, Keeps, Freezes, ReplacesData, HooksGradient, Imports)


def batch_of(step, rows=8):
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(rows, width, generator=generator) for width in (6, 3))
    return {"x": x, "y": y, "mask": torch.ones(rows, dtype=torch.bool)}


def trained(cls, backend):
    """The weights after eight steps, on the host."""
    task = cls()
    torch.manual_seed(0)
    learner = build_learner(task, backend, task.build_model(backend), TrainConfig(optimizer="sgd"))
    model = backend.unwrap(learner.model)
    for step in range(STEPS):
        task.before(step, model)
        learner.train_step(list(backend.batches([batch_of(step)])), 0.1)
    return backend.to_host(dict(model.named_parameters()))
