"""Medical segmentation: a small 3D U-Net with Dice and cross entropy."""

import numpy as np
import torch
import torch.nn.functional as F
from predicting import Predicting
from torch import nn

from tpukit.train.task import Datasets, TrainingDefaults


def volume(index):
    rng = np.random.default_rng(index)
    grid = np.stack(np.meshgrid(*[np.arange(12)] * 3, indexing="ij"))
    ball = ((grid - rng.uniform(3, 9, (3, 1, 1, 1))) ** 2).sum(0) < 9
    volume = ball[None] + rng.normal(0, 0.3, (1, 12, 12, 12))
    return {"volume": volume.astype(np.float32), "mask3d": ball.astype(np.int64)}


def block(inside, outside):
    return nn.Sequential(
        nn.Conv3d(inside, outside, 3, padding=1), nn.InstanceNorm3d(outside), nn.ReLU()
    )


class UNet3D(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.deep = block(1, 8), block(8, 16)
        self.last = nn.Sequential(block(24, 8), nn.Conv3d(8, 2, 1))

    def forward(self, volume):
        first = self.first(volume)
        deep = F.interpolate(self.deep(F.max_pool3d(first, 2)), scale_factor=2)
        return self.last(torch.cat([first, deep], 1))


class Segment(Predicting):
    defaults = TrainingDefaults(global_batch_size=4, epochs=2, lr=1e-2)

    def build_model(self, ops):
        return UNet3D()

    def datasets(self):
        return Datasets([*map(volume, range(16))], [*map(volume, range(6))])

    def loss(self, model, batch):
        scores, wanted = model(batch["volume"]).float(), batch["mask3d"]
        share = scores.softmax(1)[:, 1]
        overlap = (share * wanted).flatten(1).sum(1)
        dice = 1 - (2 * overlap + 1) / (share.flatten(1).sum(1) + wanted.flatten(1).sum(1) + 1)
        losses = F.cross_entropy(scores, wanted, reduction="none").flatten(1).mean(1)
        return {"loss": losses + dice, "dice": 1 - dice.detach()}

    def outputs(self, model, batch):
        return model(batch["volume"]).argmax(1)
