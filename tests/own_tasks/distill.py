"""Distillation: a student learns a frozen teacher's scores."""

import numpy as np
import timm
import torch
import torch.nn.functional as F
from torch import nn

from tpukit import infer
from tpukit.train.task import Datasets, Task, TrainingDefaults


class Photos(torch.utils.data.Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        image = np.random.default_rng(index).normal(index % 3, 1, (3, 32, 32))
        return {"image": image.astype(np.float32), "label": index % 3}


class Distill(Task):
    defaults = TrainingDefaults(global_batch_size=16, epochs=2, lr=1e-3)

    def build_model(self, ops):
        teacher = timm.create_model("test_vit", img_size=32, num_classes=3).requires_grad_(False)
        return nn.ModuleDict(
            {"student": timm.create_model("test_resnet", num_classes=3), "teacher": teacher}
        )

    def datasets(self):
        return Datasets(Photos(48), Photos(21))

    def loss(self, model, batch):
        with torch.no_grad():
            model["teacher"].eval()
            wanted = model["teacher"](batch["image"]).float().softmax(1)
        scores = model["student"](batch["image"]).float()
        taught = F.kl_div(scores.log_softmax(1), wanted, reduction="none").sum(1)
        return {"loss": taught + F.cross_entropy(scores, batch["label"], reduction="none")}

    def predict(self, model, backend, request, log):
        data, student = self.datasets().valid, backend.unwrap(model)["student"]
        found = infer(self, data, lambda batch: student(batch["image"]), backend)
        np.savetxt(request.out, found)
        return {"rows": len(data), "path": str(request.out)}
