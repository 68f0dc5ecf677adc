"""Object detection: torchvision's RetinaNet (not for XLA: its matching of boxes has no fixed
shapes)."""

import numpy as np
import torch
from torchvision.models import mobilenet_v2
from torchvision.models.detection import RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator

from tpukit.train.task import Datasets, Task, TrainingDefaults


def square(index):
    x, y = np.random.default_rng(index).integers(2, 30, 2)
    image = np.zeros((3, 64, 64), np.float32)
    image[:, y : y + 24, x : x + 24] = 1
    box = np.array([[x, y, x + 24, y + 24]], np.float32)
    return {"image": image, "boxes": box, "labels": np.array([1])}


class Boxes(Task):
    defaults = TrainingDefaults(global_batch_size=4, epochs=2, lr=1e-4)

    def build_model(self, ops):
        body = mobilenet_v2(weights=None, width_mult=0.25).features
        body.out_channels = 1280
        anchors = AnchorGenerator(((16, 32),), ((1.0,),))
        return RetinaNet(body, 2, anchor_generator=anchors, min_size=64, max_size=64)

    def datasets(self):
        return Datasets([*map(square, range(16))], [*map(square, range(6))])

    def loss(self, model, batch):
        targets = [{"boxes": b, "labels": label}
                   for b, label in zip(batch["boxes"], batch["labels"], strict=True)]  # fmt: skip
        was_training = model.training
        model.train()  # its losses exist in training mode alone
        losses = model([*batch["image"]], targets)
        model.train(was_training)
        total = sum(losses.values())
        return {"loss": total, "weight": batch["mask"].sum()}

    @torch.no_grad()
    def predict(self, model, backend, request, log):
        data = self.datasets().valid
        images = [torch.as_tensor(data[i]["image"]).to(backend.device) for i in range(len(data))]
        found = [row["boxes"][:1].sum(0).cpu().numpy() for row in model(images)]
        if backend.is_main:
            np.savetxt(request.out, np.stack(found))
        return {"rows": len(found), "path": str(request.out)}
