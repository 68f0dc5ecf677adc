"""From a checkpoint, or from the seed, to a learner."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import nn

from tpukit.hardware.backend import Backend
from tpukit.train.config import TrainConfig
from tpukit.train.mistakes.returned import MODEL, expect
from tpukit.train.step import Learner, build_learner
from tpukit.train.storage.checkpoint import Checkpoint
from tpukit.train.storage.state_dict import load_weights
from tpukit.train.task import Datasets, Task

MASK_63 = 2**63 - 1


def seed_everything(seed: int) -> None:
    """Seeds the host's generators: the weights of a new model come from torch's."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed & MASK_63)


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
