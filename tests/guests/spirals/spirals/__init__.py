"""Points on a spiral by a diffusion model, and by numbers: a task in one file, its settings the
constructor's parameters."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import nn

from tpukit import Datasets, Task, TrainingDefaults


@dataclass(frozen=True)
class Scoring:
    in_bits: bool = False
    """Give the loss in bits instead of nats."""


class Heights(Task):
    """The height of a point by its place."""

    name = "heights"
    test_options = Scoring
    defaults = TrainingDefaults(global_batch_size=16, max_steps=10, lr=1e-2)

    def __init__(self, data_path="./data", *, power: int = 2, width: int = 32):
        self.data_path, self.power, self.width = data_path, power, width

    def datasets(self):
        points = np.load(Path(self.data_path) / "points.npy")
        rows = [{"x": x[None] ** np.arange(1, self.power + 1), "y": y} for x, y in points]
        return Datasets(rows[10:], rows[:10])

    def build_model(self, ops):
        layers = nn.Linear(self.power, self.width), nn.SiLU(), nn.Linear(self.width, 1)
        return nn.Sequential(*layers)

    def loss(self, model, batch):
        return {"loss": (model(batch["x"].float())[:, 0] - batch["y"]).square()}

    def evaluate(self, model, backend, request, log):
        unit = np.log(2) if request.options.in_bits else 1.0
        return {"task": self.name, "samples": 1, "metrics": {"loss": 1.0 / unit}}
