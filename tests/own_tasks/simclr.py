"""Self-supervision: SimCLR with two random views of an image."""

import numpy as np
import torch
import torch.nn.functional as F
from predicting import Predicting
from torch import nn

from tpukit.train.task import Datasets, TrainingDefaults


def image(index):
    return {"image": np.random.default_rng(index).random((3, 20, 20), dtype=np.float32)}


def crop(image, rng):
    top, left = rng.integers(0, 5, 2)
    return image[:, top : top + 16, left : left + 16]


class SimClr(Predicting):
    defaults = TrainingDefaults(global_batch_size=64, epochs=2, lr=1e-3)

    def build_model(self, ops):
        return nn.Sequential(
            nn.Conv2d(3, 16, 3, 2), nn.BatchNorm2d(16), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 16),
        )  # fmt: skip

    def datasets(self):
        return Datasets([*map(image, range(128))], [*map(image, range(64))])

    def draw(self, sample, rng):
        return {"one": crop(sample["image"], rng), "two": crop(sample["image"], rng)}

    def loss(self, model, batch):
        z = F.normalize(model(torch.cat([batch["one"], batch["two"]])).float(), dim=1)
        scores = (z @ z.T / 0.5).masked_fill(torch.eye(len(z), device=z.device).bool(), -1e9)
        partner = torch.arange(len(z), device=z.device).roll(len(z) // 2)
        losses = F.cross_entropy(scores, partner, reduction="none")
        return {"loss": losses.view(2, -1).mean(0)}

    def outputs(self, model, batch):
        return model(batch["one"])
