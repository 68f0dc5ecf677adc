"""Learn to draw images: diffusion (Ho et al., 2020) by a small U-Net, sampled by DDIM.

tpukit train --task docs/tasks/unet.py:Drawings --data-path drawings --set width=64
tpukit predict --run results/drawings --out drawn.npy
`drawings` holds train.npy and valid.npy: (images, side, side) of uint8.
"""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tpukit import Datasets, Task, TrainingDefaults, infer, stack_samples

TIMES = 1000


def block(before, after, norm):
    return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), norm(after), nn.SiLU())


def kept_of(t):
    """The share of the image that is left at times t (rows,), to be multiplied with images."""
    return torch.cos(t * (1.55 / TIMES))[:, None, None, None] ** 2


class UNet(nn.Module):
    """One level down and up."""

    def __init__(self, width, norm):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, 2 * width))
        self.first, self.deeper = block(1, width, norm), block(width, 2 * width, norm)
        self.middle = block(2 * width, 2 * width, norm)
        self.up = block(3 * width, width, norm)
        self.last = nn.Conv2d(width, 1, 1)

    def forward(self, noisy, t):
        """The noise in images (rows, 1, side, side) of times t (rows,) from 1 to TIMES."""
        fine = self.first(noisy)
        coarse = self.deeper(F.max_pool2d(fine, 2))
        coarse = self.middle(coarse + self.time(t[:, None] / TIMES)[:, :, None, None])
        larger = F.interpolate(coarse, scale_factor=2, mode="nearest")
        return self.last(self.up(torch.cat([fine, larger], 1)))


class Images:
    def __init__(self, path):
        self.images = np.load(path, mmap_mode="r")

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return {"image": self.images[index][None].astype(np.float32) / 127.5 - 1}


class Noise:
    """What images are drawn from: the noise of image `index`, whatever draws it."""

    def __init__(self, count, side):
        self.count, self.side = count, side

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        rng = np.random.default_rng(index)
        return {"noise": rng.standard_normal((1, self.side, self.side), dtype=np.float32)}


class Drawings(Task):
    name = "drawings"
    defaults = TrainingDefaults(global_batch_size=64, epochs=20, lr=2e-4, ema_decay=0.999)

    def __init__(self, data_path="drawings", width=32, side=32, norm="group", count=16, steps=50):
        self.data_path, self.width, self.side = Path(data_path), width, side
        self.norm, self.count, self.steps = norm, count, steps

    def build_model(self, ops):
        norms = {"group": lambda width: nn.GroupNorm(8, width), "batch": nn.BatchNorm2d}
        return UNet(self.width, norms[self.norm])

    def datasets(self):
        return Datasets(Images(self.data_path / "train.npy"), Images(self.data_path / "valid.npy"))

    def draw(self, sample, rng):
        """Time and noise of a sample: here on the host, so that a resumed run draws the same."""
        if "image" not in sample:
            return sample
        noise = rng.standard_normal(sample["image"].shape, dtype=np.float32)
        return {**sample, "noise": noise, "t": np.float32(rng.integers(1, TIMES + 1))}

    def loss(self, model, batch):
        kept = kept_of(batch["t"])
        noisy = kept.sqrt() * batch["image"] + (1 - kept).sqrt() * batch["noise"]
        error = model(noisy, batch["t"]).float() - batch["noise"]
        return {"loss": error.square().flatten(1).mean(1)}

    def probe_batches(self, settings):
        rows = settings.micro_rows
        image = np.zeros((1, self.side, self.side), np.float32)
        return [stack_samples([{"image": image, "noise": image, "t": np.float32(1)}] * rows, rows)]

    def sample(self, model, noise, backend):
        """DDIM (Song et al., 2021): each step is the same graph, its time a tensor."""
        image, t = noise, torch.full_like(noise[:, 0, 0, 0], TIMES)
        stride = TIMES // self.steps
        for _ in range(self.steps):
            kept, later = kept_of(t), kept_of(t - stride)
            error = model(image, t).float()
            clean = ((image - (1 - kept).sqrt() * error) / kept.sqrt()).clamp(-1, 1)
            image = later.sqrt() * clean + (1 - later).sqrt() * error
            t = t - stride
            backend.finish()
        return image

    def predict(self, model, backend, request, log):
        noise = Noise(self.count, self.side)
        images = infer(self, noise, lambda b: self.sample(model, b["noise"], backend), backend)
        out = request.out or Path("drawn.npy")
        if backend.is_main:
            np.save(out, ((images[:, 0] + 1) * 127.5).clip(0, 255).astype(np.uint8))
        log(f"{len(images)} images in {out}")
        return {"rows": len(images), "path": str(out)}
