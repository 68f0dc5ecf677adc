"""A physics-informed task: u'' = -sin(x) with u = 0 at 0 and pi, by derivatives of the network."""

import numpy as np
import torch
from torch import nn

from tpukit.train.task import Datasets, Task, TrainingDefaults


class Points:
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"x": np.array([index / self.count * np.pi], np.float32)}


class Poisson(Task):
    name = "poisson"
    defaults = TrainingDefaults(global_batch_size=16, max_steps=6)

    def __init__(self, data_path: str = "") -> None:
        pass

    def build_model(self, ops) -> nn.Module:
        return nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))

    def datasets(self) -> Datasets:
        return Datasets(Points(64), Points(10))

    def loss(self, model, batch):
        with torch.enable_grad():
            x = batch["x"].detach().requires_grad_()
            u = model(x) * x * (torch.pi - x)
            [du] = torch.autograd.grad(u.sum(), x, create_graph=True)
            [ddu] = torch.autograd.grad(du.sum(), x, create_graph=True)
        return {"loss": (ddu + x.sin()).square()[:, 0]}
