"""Graph regression: message passing over edges, graphs of many sizes."""

import numpy as np
import torch
from predicting import Predicting
from torch import nn

from tpukit.train.task import Datasets, TrainingDefaults

NODES, EDGES = 12, 24


def graph(index):
    rng = np.random.default_rng(index)
    nodes = rng.integers(4, NODES)
    kinds, edges = np.zeros((NODES, 3), np.float32), np.zeros((2, EDGES), np.int64)  # glue
    kinds[:nodes] = np.eye(3)[rng.integers(0, 3, nodes)]
    edges[:, : 2 * nodes] = rng.integers(0, nodes, (2, 2 * nodes))
    real = (np.arange(EDGES) < 2 * nodes).astype(np.float32)  # glue
    target = np.float32(kinds[:, 0].sum())
    return {"kinds": kinds, "edges": edges, "real": real, "target": target}


class GraphNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(3, 16), nn.Linear(16, 1)
        self.message, self.update = nn.Linear(16, 16), nn.GRUCell(16, 16)

    def forward(self, kinds, edges, real):
        hidden = self.enter(kinds)
        width = hidden.shape[-1]
        for _ in range(2):
            source, target = (e[..., None].expand(-1, -1, width) for e in edges.unbind(1))
            sent = self.message(hidden.gather(1, source)) * real[..., None]
            received = torch.zeros_like(hidden).scatter_add(1, target, sent.to(hidden.dtype))
            hidden = self.update(received.flatten(0, 1), hidden.flatten(0, 1)).view_as(hidden)
        return self.leave(hidden).sum((1, 2))


class Molecules(Predicting):
    defaults = TrainingDefaults(global_batch_size=16, epochs=2, lr=1e-2)

    def build_model(self, ops):
        return GraphNet()

    def datasets(self):
        return Datasets([*map(graph, range(64))], [*map(graph, range(21))])

    def loss(self, model, batch):
        found = model(batch["kinds"], batch["edges"], batch["real"]).float()
        return {"loss": (found - batch["target"]).square()}

    def outputs(self, model, batch):
        return model(batch["kinds"], batch["edges"], batch["real"])
