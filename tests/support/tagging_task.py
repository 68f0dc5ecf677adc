"""A task whose loss is a mean over tokens, as transformers' models return it."""

import numpy as np
import torch.nn.functional as F
from torch import nn

from tpukit.train.task import Datasets, Task, TrainingDefaults

WORDS, CLASSES, LENGTH = 11, 5, 6


class Texts:
    """Tokens with a label each; -100 where there is none. `wrong`: (sample, entry, value)."""

    def __init__(self, count, wrong=None):
        self.count, self.wrong = count, wrong

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        rng = np.random.default_rng(index)
        sample = {
            "tokens": rng.integers(WORDS, size=LENGTH),
            "labels": rng.integers(CLASSES, size=LENGTH),
        }
        sample["labels"][rng.integers(1, LENGTH + 1) :] = -100
        if self.wrong and self.wrong[0] == index:
            sample[self.wrong[1]][0] = self.wrong[2]
        return sample


class Tagger(Task):
    """A class for each token, its loss a mean over tokens as transformers' models return it."""

    name = "tagger"
    defaults = TrainingDefaults(global_batch_size=8, max_steps=4, lr=1e-2)

    def __init__(self, fix="", wrong=-1, entry="labels", value=CLASSES, valid=11, data_path=""):
        self.fix, self.valid = fix, valid
        self.wrong = None if wrong < 0 else (wrong, entry, value)

    def build_model(self, ops):
        return nn.Sequential(nn.Embedding(WORDS, 8), nn.Linear(8, CLASSES))

    def datasets(self):
        return Datasets(Texts(32, self.wrong), Texts(self.valid))

    def loss(self, model, batch):
        labels = batch["labels"]
        if self.fix == "weight":
            labels = labels.masked_fill(batch["mask"][:, None] == 0, -100)
        scores = model(batch["tokens"]).float()
        loss = F.cross_entropy(scores.view(-1, CLASSES), labels.view(-1))
        if self.fix == "weight":
            return {"loss": loss, "weight": (labels != -100).sum()}
        return {"loss": loss}
