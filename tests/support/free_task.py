"""A task that chooses what a task may: stream, optimizer, rates, schedule, metrics, hook."""

import sys
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import IterableDataset

from tpukit.train.task import Datasets, ParameterGroup

sys.path.append(str(Path(__file__).parent))
from tiny_task import Rows, Tiny


class Endless(IterableDataset):
    """Samples by their number, passes of 40; it can go on at any of them."""

    def __init__(self) -> None:
        self.place = self.first = 0

    def __iter__(self):
        rows = Rows(40)
        first, self.first = self.first, 0
        for index in range(first, len(rows)):
            self.place = index + 1
            yield rows[index]

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.first = state["place"]


def area_under_curve(scores, labels) -> float:
    """The part of (positive, negative) pairs that the scores put in order."""
    positive, negative = scores[labels == 1], scores[labels == 0]
    return float((positive[:, None] > negative[None]).mean())


class Free(Tiny):
    """One layer is frozen, the others have rates of their own."""

    name = "free"

    def __init__(self, optimizer_class: str = "Adam", data_path: str = "") -> None:
        super().__init__()
        self.optimizer_class = optimizer_class

    def build_model(self, ops):
        model = super().build_model(ops)
        model[0].bias.requires_grad_(False)
        return model

    def datasets(self):
        return Datasets(Endless(), {"near": Rows(10), "far": Rows(21)})

    def parameter_groups(self, model, weight_decay):
        matrices = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
        vectors = [p for p in model.parameters() if p.requires_grad and p.ndim == 1]
        return [ParameterGroup(matrices, weight_decay, lr_scale=0.5), ParameterGroup(vectors)]

    def build_optimizer(self, groups, settings):
        if not self.optimizer_class:
            return None
        options = [group.options() for group in groups]
        return getattr(torch.optim, self.optimizer_class)(options, settings.lr)

    def learning_rate(self, step, total_steps, config):
        return config.lr * 0.9**step

    def validation_rows(self, model, batch):
        return {"score": model(batch["x"])[:, 0], "label": (batch["y"][:, 0] > 0).long(),
                "first": batch["x"][:, :2]}  # fmt: skip

    def compute(self, rows):
        assert rows["first"].shape[1:] == (2,)
        return {"auc": area_under_curve(rows["score"], rows["label"]), "rows": len(rows["label"]),
                "ordered": float(np.abs(np.diff(rows["first"][:, 0])).sum())}  # fmt: skip
