"""A network with BatchNorm, upsampling, a head that no loss depends on and buffers of types that
gloo does not send, on synthetic images."""

import numpy as np
import torch
from torch import nn

from tpukit.train.task import Datasets, Task, TrainingDefaults, stack_samples


class Images:
    """`count` images made from the index alone."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(index)
        image = rng.standard_normal((3, 4, 4), dtype=np.float32) + index % 3
        return {"image": image, "label": np.int64(index % 3)}


class Net(nn.Module):
    """Two BatchNorms, one without weights; a bias before one would have noise for a gradient.
    Beside them an InstanceNorm with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(),
            nn.InstanceNorm2d(4, track_running_stats=True),
        )  # fmt: skip
        self.grow = nn.Upsample(scale_factor=2, mode="bilinear")
        self.leave = nn.Sequential(nn.Conv2d(4, 3, 3, bias=False), nn.BatchNorm2d(3, affine=False))
        self.pooler = nn.Linear(3, 3)
        self.register_buffer("passes", torch.zeros((), dtype=torch.int16))
        self.register_buffer("edges", torch.arange(3).to(torch.uint16))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        hidden = self.leave(self.grow(self.enter(image))).mean((2, 3))
        self.pooler(hidden)
        if self.training:
            self.passes += 1
        return hidden


class Normalizing(Task):
    name = "normalizing"
    defaults = TrainingDefaults(
        global_batch_size=16, max_steps=6, lr=1e-2, ema_decay=0.8, rows_per_device=1024
    )

    def __init__(self, data_path: str = "") -> None:
        pass

    def build_model(self, ops) -> nn.Module:
        return Net()

    def datasets(self) -> Datasets:
        return Datasets(Images(48), Images(12))

    def loss(self, model, batch):
        scores = model(batch["image"]).float()
        return {"loss": nn.functional.cross_entropy(scores, batch["label"], reduction="none")}

    def probe_batches(self, settings):
        rows = settings.micro_rows
        return [stack_samples([Images(1)[0]] * rows, rows)]


class Selecting(Normalizing):
    """The size of what its loss selects depends on values."""

    name = "selecting"

    def loss(self, model, batch):
        selected = batch["image"][batch["image"] > 0].mean()
        return {"loss": super().loss(model, batch)["loss"] + selected}
