"""A trained model's outputs for every sample of a data set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tpukit.hardware.backend import Backend, Batch
from tpukit.train.loader import LoaderSettings, make_loader
from tpukit.train.task import PlanSettings, SampleSource, Task

ROWS_PER_DEVICE = 16
IN_PROCESS = LoaderSettings(workers=0, seed=0)


@torch.no_grad()
def infer(
    task: Task,
    data: SampleSource,
    forward: Callable[[Batch], Tensor],
    backend: Backend,
    rows_per_device: int = ROWS_PER_DEVICE,
    loading: LoaderSettings = IN_PROCESS,
) -> NDArray[Any]:
    """`forward(batch)` (rows, ...) of every sample, (samples, ...) in order, float32 on the host.

    The ranks share the work; every rank must call it and gets all outputs.
    """
    rows = rows_per_device * backend.devices
    settings = PlanSettings(rows, rows, backend.devices, seed=0)
    shares = [
        micro.share(backend.rank, backend.world_size)
        for micro in task.evaluation_batches(data, settings)
    ]
    parts = []
    for batch in backend.batches(make_loader(task, data, shares, loading)):
        with backend.autocast():
            outputs = forward(batch)
        parts.append(backend.to_host({"outputs": outputs.float()})["outputs"].numpy())
        backend.finish()
    # One batch is the ranks' parts one after the other; filled rows come last.
    batches = zip(*backend.all_gather_objects(parts), strict=True)
    return np.concatenate([part for batch in batches for part in batch])[: len(data)]
