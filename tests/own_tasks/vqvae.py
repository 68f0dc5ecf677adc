"""A VQ-VAE: a codebook with a straight-through gradient."""

import numpy as np
import torch.nn.functional as F
from predicting import Predicting
from torch import nn

from tpukit.train.task import Datasets, TrainingDefaults


def wave(index):
    phase = np.random.default_rng(index).uniform(0, 6)
    wave = np.sin(np.arange(16) * 0.5 + phase)
    return {"image": np.outer(wave, wave)[None].astype(np.float32)}


class VQVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 8, 4, 2, 1), nn.ReLU(), nn.Conv2d(8, 4, 4, 2, 1))
        self.codes = nn.Embedding(16, 4)
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(4, 8, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(8, 1, 4, 2, 1)
        )

    def nearest(self, image):
        z = self.encoder(image).permute(0, 2, 3, 1)
        distance = (z[..., None, :] - self.codes.weight).square().sum(-1)
        return z, distance.argmin(-1)

    def forward(self, image):
        z, index = self.nearest(image)
        code = self.codes(index)
        made = self.decoder((z + (code - z).detach()).permute(0, 3, 1, 2))
        return made, z, code


class Codebook(Predicting):
    defaults = TrainingDefaults(global_batch_size=16, epochs=2, lr=1e-3)

    def build_model(self, ops):
        return VQVAE()

    def datasets(self):
        return Datasets([*map(wave, range(64))], [*map(wave, range(21))])

    def loss(self, model, batch):
        made, z, code = model(batch["image"])
        rebuilt = F.mse_loss(made.float(), batch["image"], reduction="none").flatten(1).mean(1)
        book = F.mse_loss(code, z.detach(), reduction="none").flatten(1).mean(1)
        commit = F.mse_loss(z, code.detach(), reduction="none").flatten(1).mean(1)
        return {"loss": rebuilt + book + 0.25 * commit, "rebuilt": rebuilt}

    def outputs(self, model, batch):
        return model.nearest(batch["image"])[1].flatten(1)
