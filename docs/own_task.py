"""A task of your own: classify images with a timm model, on any hardware tpukit knows.

tpukit train --task docs/own_task.py:Images --data-path photos --set model=resnet18
tpukit test --run results/photos
tpukit predict --run results/photos --data-path photos --out classes.csv
`photos` holds train/CLASS/*.png and valid/CLASS/*.png.
"""

import csv
from pathlib import Path

import numpy as np
import timm
import torch.nn.functional as F
from PIL import Image

from tpukit import Datasets, Task, TrainingDefaults, infer, stack_samples


class ImageFolder:
    def __init__(self, folder, side):
        self.files = sorted(folder.glob("*/*.png"))
        self.classes = sorted({file.parent.name for file in self.files})
        self.labels = np.array([self.classes.index(file.parent.name) for file in self.files])
        self.side = side

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        image = Image.open(self.files[index]).convert("RGB").resize((self.side, self.side))
        pixels = np.asarray(image, dtype=np.float32).transpose(2, 0, 1) / 127.5 - 1
        return {"image": pixels, "label": self.labels[index]}


class Images(Task):
    name = "photos"
    defaults = TrainingDefaults(global_batch_size=32, epochs=5, lr=1e-3, weight_decay=0.05)

    def __init__(self, data_path="./data", model="resnet18", classes=2, side=64):
        self.data_path, self.model, self.classes, self.side = data_path, model, classes, side

    def build_model(self, ops):
        return timm.create_model(self.model, num_classes=self.classes)

    def datasets(self):
        return Datasets(self.images("train"), self.images("valid"))

    def images(self, part, data_path=None):
        return ImageFolder(Path(data_path or self.data_path) / part, self.side)

    def loss(self, model, batch):
        scores = model(batch["image"])
        right = scores.argmax(1) == batch["label"]
        loss = F.cross_entropy(scores, batch["label"], reduction="none")
        return {"loss": loss, "accuracy": right.float()}

    def probe_batches(self, settings):
        rows = settings.micro_rows
        sample = {"image": np.zeros((3, self.side, self.side), np.float32), "label": 0}
        return [stack_samples([sample] * rows, rows)]

    def evaluate(self, model, backend, request, log):
        images = self.images("valid", request.data_path)
        scores = infer(self, images, lambda batch: model(batch["image"]), backend)
        accuracy = float((scores.argmax(1) == images.labels).mean())
        log(f"{len(images)} images: accuracy {accuracy:.1%}")
        return {"task": self.name, "samples": len(images), "metrics": {"accuracy": accuracy}}

    def predict(self, model, backend, request, log):
        images = self.images("valid", request.data_path)
        scores = infer(self, images, lambda batch: model(batch["image"]), backend)
        out = request.out or Path("classes.csv")
        if backend.is_main:
            named = [images.classes[index] for index in scores.argmax(1)]
            with out.open("w", newline="") as file:
                csv.writer(file).writerow(["file", "class"])
                csv.writer(file).writerows(zip(images.files, named, strict=True))
        log(f"{len(images)} classes in {out}")
        return {"rows": len(images), "path": str(out)}
