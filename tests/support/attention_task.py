"""A task whose model attends: 128 tokens, which the TPU's kernels take."""

import numpy as np
from torch import nn

from tpukit import Datasets, Task

TOKENS, WIDTH, HEADS = 128, 32, 2


def row(index):
    draws = np.random.default_rng(index)
    return {"x": draws.standard_normal((TOKENS, WIDTH), dtype=np.float32)}


class Attention(nn.Module):
    def __init__(self, ops):
        super().__init__()
        self.ops = ops
        self.inputs = nn.Linear(WIDTH, 3 * WIDTH)
        self.output = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        rows = x.shape[0]
        query, key, value = (
            part.reshape(rows, TOKENS, HEADS, -1).transpose(1, 2)
            for part in self.inputs(x).chunk(3, dim=-1)
        )
        found = self.ops.attention(query, key, value, causal=True)
        return self.output(found.transpose(1, 2).reshape(rows, TOKENS, WIDTH))


class Attending(Task):
    name = "attending"

    def build_model(self, ops):
        return Attention(ops)

    def datasets(self):
        return Datasets(train=[*map(row, range(16))], valid=None)

    def loss(self, model, batch):
        return {"loss": (model(batch["x"]).float() - batch["x"]).square().mean((1, 2))}
