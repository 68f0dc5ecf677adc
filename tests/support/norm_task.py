"""A network with BatchNorm, upsampling, a head that no loss depends on and buffers of types that
gloo does not send, on synthetic images; a task that chooses all that it may."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import IterableDataset

from tpukit.train.task import Datasets, ParameterGroup, Task, TrainingDefaults, stack_samples


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


class Endless(IterableDataset):
    """Images by their number, passes of 40; it can go on at any of them."""

    def __init__(self) -> None:
        self.place = self.first = 0

    def __iter__(self):
        first, self.first = self.first, 0
        for index in range(first, 40):
            self.place = index + 1
            yield Images(40)[index]

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.first = state["place"]


def area_under_curve(scores, labels) -> float:
    """The part of (positive, negative) pairs that the scores put in order."""
    positive, negative = scores[labels == 1], scores[labels == 0]
    return float((positive[:, None] > negative[None]).mean())


class Free(Normalizing):
    """Chooses what a task may: a stream, an optimizer with rates of its own, a frozen layer, a
    schedule, two validation sets and their metrics."""

    name = "free"

    def build_model(self, ops):
        model = super().build_model(ops)
        model.leave[0].requires_grad_(False)
        return model

    def datasets(self):
        return Datasets(Endless(), {"near": Images(10), "far": Images(21)})

    def parameter_groups(self, model, weight_decay):
        trained = [p for p in model.parameters() if p.requires_grad]
        return [
            ParameterGroup([p for p in trained if p.ndim > 1], weight_decay, lr_scale=0.5),
            ParameterGroup([p for p in trained if p.ndim == 1]),
        ]

    def build_optimizer(self, groups, settings):
        return torch.optim.Adam([group.options() for group in groups], settings.lr)

    def learning_rate(self, step, total_steps, config):
        return config.lr * 0.9**step

    def validation_rows(self, model, batch):
        return {"score": model(batch["image"])[:, 0], "label": (batch["label"] > 0).long(),
                "first": batch["image"][:, 0, 0, :2]}  # fmt: skip

    def compute(self, rows):
        assert rows["first"].shape[1:] == (2,)
        return {"auc": area_under_curve(rows["score"], rows["label"]), "rows": len(rows["label"]),
                "ordered": float(np.abs(np.diff(rows["first"][:, 0])).sum())}  # fmt: skip


class Selecting(Normalizing):
    """The size of what its loss selects depends on values."""

    name = "selecting"

    def loss(self, model, batch):
        selected = batch["image"][batch["image"] > 0].mean()
        return {"loss": super().loss(model, batch)["loss"] + selected}
