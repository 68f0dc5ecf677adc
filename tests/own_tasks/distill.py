"""Distillation: a student learns a frozen teacher's scores."""

import numpy as np
import timm
import torch
import torch.nn.functional as F
from predicting import Predicting
from torch import nn

from tpukit.train.task import Datasets, TrainingDefaults


def photo(index):
    image = np.random.default_rng(index).normal(index % 3, 1, (3, 32, 32))
    return {"image": image.astype(np.float32), "label": index % 3}


class Distill(Predicting):
    defaults = TrainingDefaults(global_batch_size=16, epochs=2, lr=1e-3)

    def build_model(self, ops):
        teacher = timm.create_model("test_vit", img_size=32, num_classes=3).requires_grad_(False)
        return nn.ModuleDict(
            {"student": timm.create_model("test_resnet", num_classes=3), "teacher": teacher}
        )

    def datasets(self):
        return Datasets([*map(photo, range(48))], [*map(photo, range(21))])

    def loss(self, model, batch):
        with torch.no_grad():
            model["teacher"].eval()
            wanted = model["teacher"](batch["image"]).float().softmax(1)
        scores = model["student"](batch["image"]).float()
        taught = F.kl_div(scores.log_softmax(1), wanted, reduction="none").sum(1)
        return {"loss": taught + F.cross_entropy(scores, batch["label"], reduction="none")}

    def outputs(self, model, batch):
        return model["student"](batch["image"])
