"""From a checkpoint, or from the seed, to a learner."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

from tpukit.errors import CheckpointError
from tpukit.hardware.backend import Backend
from tpukit.train.config import TrainConfig
from tpukit.train.mistakes.returned import MODEL, expect
from tpukit.train.step import Learner, build_learner
from tpukit.train.storage.checkpoint import Checkpoint
from tpukit.train.storage.run_folder import TrainedRun, open_run
from tpukit.train.storage.state_dict import load_weights
from tpukit.train.task import Datasets, Task

MASK_63 = 2**63 - 1


def seed_everything(seed: int) -> None:
    """Seeds the host's generators: the weights of a new model come from torch's."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed & MASK_63)


def open_initial_run(task: Task, source: str, log: Callable[[str], None]) -> TrainedRun:
    """The run that `init_from` names. Raises CheckpointError for another task."""
    try:
        run = open_run(Path(source), log)
    except CheckpointError as error:
        hint = "Give the folder of a run, or one of its checkpoints."
        raise CheckpointError(f"--init-from: {error.message}", hint) from error
    if run.task != task.name:
        raise CheckpointError(
            f"--init-from {source} is a run of task {run.task!r}, not {task.name!r}.",
            "Copy what fits in the task's `initialize(model, data)`, from"
            f" `tpukit.load({source!r}).weights()`.",
        )
    return run


def load_initial_weights(model: nn.Module, task: Task, source: str) -> None:
    """Loads another run's best (EMA) weights. Raises CheckpointError naming what does not fit."""
    weights = open_initial_run(task, source, lambda line: None).weights()
    hint = (
        "Give the settings of its model, or copy what fits in the task's `initialize(model, data)`,"
        f" from `tpukit.load({source!r}).weights()`."
    )
    load_weights(model, weights, f"--init-from {source}", hint)


def load_learner(
    task: Task,
    config: TrainConfig,
    backend: Backend,
    checkpoint: Checkpoint | None = None,
    data: Datasets | None = None,
) -> Learner:
    """The learner as a checkpoint left it, or as the seed and the data initialise it.

    data: None where only shapes matter (a memory trial).
    """
    seed_everything(config.global_seed)
    model = expect(task.build_model(backend), nn.Module, task.build_model, MODEL)
    if checkpoint is not None:
        load_weights(model, checkpoint.tensors("model"), str(checkpoint.path))
    elif data is not None and config.init_from is not None:
        load_initial_weights(model, task, config.init_from)
    elif data is not None:
        task.initialize(model, data)
    learner = build_learner(task, backend, model, config)
    backend.seed(config.global_seed)
    if checkpoint is None:
        return learner
    tensors = checkpoint.tensors("optimizer")
    learner.optimizer_state.restore(backend, checkpoint.state.optimizer, tensors)
    if learner.ema:
        # Before buffers were averaged, a checkpoint held only the model's own.
        kept = {**checkpoint.tensors("model"), **checkpoint.tensors("ema")}
        backend.load(learner.ema.weights, kept)
    backend.load({"window": learner.window}, {"window": torch.tensor(checkpoint.state.window)})
    learner.set_steps_done(checkpoint.state.step)
    backend.load_state({"scaler": checkpoint.state.scaler})
    if len(checkpoint.state.random) == backend.world_size:
        backend.load_state({"random": checkpoint.state.random[backend.rank]})
    return learner
