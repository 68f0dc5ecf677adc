"""Two steps of the engine on a small network and synthetic data: the step that training repeats."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from tpukit.hardware.backend import Backend, Batch, ModelOps, OptimizerSettings
from tpukit.train.learner import Learner
from tpukit.train.task import Datasets, Task

WIDTH = 64
ROWS_PER_DEVICE = 4


class ProbeTask(Task):
    """Learns the sum of each row's numbers."""

    name = "probe"

    def build_model(self, ops: ModelOps) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1))

    def datasets(self) -> Datasets:
        raise NotImplementedError("the probe's batch is synthetic")

    def loss(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return {"loss": (model(batch["x"]).float()[:, 0] - batch["y"]).square()}


def train_one_step(backend: Backend) -> str:
    """Two steps of the engine (the second shows whether the first left things sound).

    Raises RuntimeError where the loss is not finite or the weights stay as they were.
    """
    torch.manual_seed(0)
    task = ProbeTask()
    model = backend.prepare(task.build_model(backend))
    optimizer = backend.optimizer(task.parameter_groups(model, 0.0), OptimizerSettings())
    learner = Learner(task, backend, model, optimizer, None, clip_norm=1.0)
    rows = ROWS_PER_DEVICE * backend.devices // backend.world_size
    x = torch.randn(rows, WIDTH)
    host = {"x": x, "y": x.sum(1), "mask": torch.ones(rows)}
    first = _weights(backend, model)
    for batch in backend.batches([host, host]):
        learner.train_step([batch], lr=1e-2)
    loss = learner.read_metrics().means["loss"]
    if not math.isfinite(loss):
        raise RuntimeError(f"the loss of the first step is {loss}")
    if all(torch.equal(first[name], after) for name, after in _weights(backend, model).items()):
        raise RuntimeError("a training step left every weight as it was")
    return f"loss {loss:.3g} in {backend.precision}"


def _weights(backend: Backend, model: nn.Module) -> dict[str, Tensor]:
    return backend.to_host({n: p.detach() for n, p in backend.unwrap(model).named_parameters()})
