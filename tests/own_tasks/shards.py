"""A stream of tar shards, decoded in DataLoader workers."""

import io
import tarfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from predicting import Predicting
from torch import nn

from tpukit.train.task import Datasets, TrainingDefaults


def write_shards(folder):
    Path(folder).mkdir(parents=True, exist_ok=True)
    for shard in range(4):
        with tarfile.open(f"{folder}/{shard}.tar", "w") as tar:
            for index in range(12):
                label = index % 2
                pixels = np.random.default_rng(index).integers(0, 128, (8, 8, 3)) + 120 * label
                png = io.BytesIO()
                Image.fromarray(pixels.astype(np.uint8)).save(png, "png")
                info = tarfile.TarInfo(f"{index}-{label}.png")
                info.size = png.tell()
                tar.addfile(info, io.BytesIO(png.getvalue()))


class Shards(torch.utils.data.IterableDataset):
    def __init__(self, folder, shards):
        self.files = [f"{folder}/{shard}.tar" for shard in shards]

    def __iter__(self):
        for file in self.files:
            with tarfile.open(file) as tar:
                for member in tar:
                    data = tar.extractfile(member).read()
                    yield {"png": data, "label": int(member.name.split("-")[1][0])}


class Streamed(Predicting):
    defaults = TrainingDefaults(global_batch_size=8, max_steps=8, lr=1e-2)

    def __init__(self, data_path="shards"):
        self.data_path = data_path

    def build_model(self, ops):
        return nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.ReLU(), nn.Linear(16, 2))

    def datasets(self):
        return Datasets(Shards(self.data_path, range(3)), [*Shards(self.data_path, [3])])

    def draw(self, sample, rng):
        pixels = np.asarray(Image.open(io.BytesIO(sample["png"])), np.float32) / 255
        return {"image": pixels, "label": sample["label"]}

    def loss(self, model, batch):
        scores = model(batch["image"]).float()
        return {"loss": F.cross_entropy(scores, batch["label"], reduction="none")}

    def outputs(self, model, batch):
        return model(batch["image"])
