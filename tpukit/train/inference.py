"""A trained model's outputs for every sample of a data set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tpukit.hardware.backend import Backend, Batch
from tpukit.train.loader import LoaderSettings, SeeBatch, make_loader
from tpukit.train.task import MicroBatch, PlanSettings, SampleSource, Task

ROWS_PER_DEVICE = 16
IN_PROCESS = LoaderSettings(workers=0, seed=0)
Rows = dict[str, NDArray[Any]]


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

    def outputs(batch: Batch) -> Rows:
        with backend.autocast():
            found = forward(batch)
        values = backend.to_host({"outputs": found.float()})["outputs"].numpy()
        backend.finish()
        return {"outputs": values, "mask": np.ones(len(values))}

    rows = rows_per_device * backend.devices
    settings = PlanSettings(rows, rows, backend.devices, seed=0, compiles=backend.compiles)
    micro_batches = list(task.evaluation_batches(data, settings))
    # Filled rows stay: what a sample gives does not depend on how many come with it.
    return rows_of_data(task, data, micro_batches, backend, loading, outputs)["outputs"]


def rows_of_data(
    task: Task,
    data: SampleSource,
    micro_batches: Sequence[MicroBatch],
    backend: Backend,
    loading: LoaderSettings,
    forward: Callable[[Batch], Rows],
    see: SeeBatch | None = None,
) -> Rows:
    """What `forward` returns for each batch, as rows of the whole data set in its order.

    Each rank computes its share and gets all rows. `forward` returns arrays (rows, ...) with a
    `mask` (rows,), or {} for every batch.
    """
    shares = [micro.share(backend.rank, backend.world_size) for micro in micro_batches]
    loader = make_loader(task, data, shares, loading, see)
    parts = [forward(batch) for batch in backend.batches(loader)]
    if not any(parts):
        return {}
    return in_data_order(backend.all_gather_objects(parts), micro_batches)


def in_data_order(parts: Sequence[Sequence[Rows]], micro_batches: Sequence[MicroBatch]) -> Rows:
    """The ranks' parts of each batch as rows of the whole set, without masked and filled ones."""
    # One batch is the ranks' parts one after the other; filled rows come last.
    whole = [
        {name: np.concatenate([part[name] for part in ranks])[: len(micro.keys)]
         for name in ranks[0]}
        for ranks, micro in zip(zip(*parts, strict=True), micro_batches, strict=True)
    ]  # fmt: skip
    rows = {name: np.concatenate([batch[name] for batch in whole]) for name in whole[0]}
    samples = np.array([key.sample for micro in micro_batches for key in micro.keys])
    order = np.argsort(samples, kind="stable")
    kept = order[rows.pop("mask")[order] > 0]
    return {name: values[kept] for name, values in rows.items()}
