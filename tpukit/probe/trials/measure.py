"""Measured trials: the engine's own step on synthetic batches, timed, with its peak memory."""

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace

import torch

from tpukit.hardware.backend import Backend, Batch
from tpukit.hardware.memory import ReadMemory
from tpukit.hardware.prefetch import BATCHES_AHEAD
from tpukit.probe.trial import (
    LONG_ENOUGH_SECONDS,
    TIMED_STEPS,
    Trial,
    TrialRequest,
    memory_by_kind,
)
from tpukit.train.config import TrainConfig
from tpukit.train.learner import Learner
from tpukit.train.loader import example_batches
from tpukit.train.run_state import load_learner
from tpukit.train.task import PlanSettings, Task

WARM_ROWS = 2
"""Batch size of the first step, which creates the optimizer state; BatchNorm needs two."""
RUN_BYTES = 32 * 2**20
"""Bytes that a run's DataLoader, logs, checkpoint writer and threads take beside the batches; half
of them are thread stacks of the worker pool that read the data, which glibc keeps."""


def measure_trial(
    task: Task,
    config: TrainConfig,
    backend: Backend,
    request: TrialRequest,
    read_memory: ReadMemory,
) -> Trial:
    """Trains, evaluates and copies a checkpoint as a run would.

    read_memory: memory usage since the trial began.

    Raises whatever the hardware raises when memory runs out.
    """
    held = torch.empty(RUN_BYTES, dtype=torch.uint8)
    learner = load_learner(task, config, backend)
    costliest, *others = _host_batches(task, backend, request)
    keeps = backend.usage().keeps_freed_memory
    # The step that creates the optimizer state needs few samples.
    few = replace(request, batch=min(request.batch, WARM_ROWS))
    warm = costliest if keeps else _host_batches(task, backend, few)[0]
    _step(learner, config, list(backend.batches([warm] * request.accumulate)))
    # As in a run, the next batches are sent while a step works, and wait on the device.
    source = backend.batches(_copies(costliest))
    seconds = _seconds_per_step(learner, config, source, request.accumulate)
    between = read_memory()
    for host in others if keeps else ():
        _step(learner, config, list(backend.batches([host] * request.accumulate)))
    _evaluate(learner, next(source))
    resident = _copy_checkpoint(learner, backend)
    # Transfer errors surface when a batch is consumed.
    _next(source, BATCHES_AHEAD)
    memory = read_memory()
    del held
    used, limit = (memory.peak, memory.limit) if memory else (None, None)
    waiting = (BATCHES_AHEAD + 1) * sum(t.nbytes for t in costliest.values())
    return Trial(
        batch=request.batch,
        fits=True,
        used_bytes=used,
        limit_bytes=limit,
        # Of a step only batches that wait stay behind; the peak may be outside of training.
        fixed_bytes=used - (between.peak - between.used) - waiting if used and between else None,
        samples_per_second=request.batch * backend.devices * request.accumulate / seconds,
        accumulate=request.accumulate,
        memory=memory_by_kind(used or 0, 0, resident),
        parameters=sum(p.numel() for p in backend.unwrap(learner.model).parameters()),
        devices=backend.devices,
    )


def _host_batches(task: Task, backend: Backend, request: TrialRequest) -> list[Batch]:
    """This rank's part of a batch in each shape, the costliest first."""
    devices = backend.devices // backend.world_size
    rows = request.batch * devices
    settings = PlanSettings(rows * request.accumulate, rows, devices, 0, compiles=backend.compiles)
    return example_batches(task, settings)


def _copies(batch: Batch) -> Iterator[Batch]:
    """Endless copies of the batch, as a DataLoader allocates them; `batch` itself stands for the
    samples of the next one."""
    while True:
        yield {name: tensor.clone() for name, tensor in batch.items()}


def _next(source: Iterator[Batch], count: int) -> list[Batch]:
    return list(itertools.islice(source, count))


def _step(learner: Learner, config: TrainConfig, batches: list[Batch]) -> None:
    learner.train_step(batches, config.lr)
    # XLA raises only when a value is read.
    learner.read_metrics()


def _seconds_per_step(
    learner: Learner, config: TrainConfig, source: Iterator[Batch], accumulate: int
) -> float:
    started = time.monotonic()
    steps = 0
    while steps < TIMED_STEPS and time.monotonic() - started < LONG_ENOUGH_SECONDS:
        learner.train_step(_next(source, accumulate), config.lr)
        steps += 1
        if steps == 1:
            learner.read_metrics()
    learner.read_metrics()
    return (time.monotonic() - started) / steps


def _evaluate(learner: Learner, batch: Batch) -> None:
    """Evaluates a batch with the EMA weights, as a run validates."""
    with learner.evaluation_weights():
        learner.model.eval()
        learner.sums.add(batch)
        learner.sums.read()
        learner.model.train()


def _copy_checkpoint(learner: Learner, backend: Backend) -> dict[str, int]:
    """Copies to the host what a checkpoint copies, all at once; its bytes by kind."""
    with learner.evaluation_weights() as averaged:
        copies = {
            "parameters": backend.to_host(learner.model_tensors()),
            "optimizer": backend.to_host(learner.optimizer_state.tensors()),
            "ema": backend.to_host(averaged),
        }
    return {
        kind: sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        for kind, tensors in copies.items()
    }
