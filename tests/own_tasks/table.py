"""Tabular data: a transformer over columns (FT-Transformer), with a rank metric."""

import torch
from predicting import Predicting
from torch import nn

from tpukit.train.task import Datasets, TrainingDefaults


class Rows(torch.utils.data.TensorDataset):
    def __init__(self, count, seed):
        x = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
        super().__init__(x, (x[:, 0] * x[:, 1] > 0).float())

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return {"x": x, "y": y}


class Columns(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.randn(6, 16)) for _ in range(2))
        self.start = nn.Parameter(torch.randn(1, 1, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, 1), nn.Linear(16, 1)

    def forward(self, x):
        tokens = x[..., None] * self.weight + self.bias
        tokens = torch.cat([self.start.expand(len(x), -1, -1), tokens], 1)
        return self.head(self.body(tokens)[:, 0])[:, 0]


class Table(Predicting):
    defaults = TrainingDefaults(global_batch_size=32, epochs=2, lr=1e-3)

    def build_model(self, ops):
        return Columns()

    def datasets(self):
        return Datasets(Rows(128, 0), Rows(45, 1))

    def loss(self, model, batch):
        score = model(batch["x"]).float()
        loss = nn.functional.binary_cross_entropy_with_logits(score, batch["y"], reduction="none")
        return {"loss": loss}

    def validation_rows(self, model, batch):
        return {"score": model(batch["x"]), "y": batch["y"]}

    def compute(self, rows):
        order = rows["score"].argsort().argsort() + 1.0
        right = rows["y"] > 0.5
        above = order[right].sum() - right.sum() * (right.sum() + 1) / 2
        return {"auc": above / (right.sum() * (~right).sum())}

    def outputs(self, model, batch):
        return model(batch["x"])
