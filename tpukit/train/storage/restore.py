"""From a checkpoint, or from the seed, to a learner."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import torch

from tpukit.errors import CheckpointError
from tpukit.hardware.backend import Backend
from tpukit.train.config import TrainConfig
from tpukit.train.step import Learner, build_learner
from tpukit.train.storage.checkpoint import Checkpoint
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
    model = task.build_model(backend)
    if checkpoint is not None:
        load_weights(model, checkpoint.tensors("model"), str(checkpoint.path))
    elif data is not None:
        task.initialize(model, data)
    learner = build_learner(task, backend, model, config)
    backend.seed(config.global_seed)
    if checkpoint is None:
        return learner
    backend.load(learner.optimizer_tensors(), checkpoint.tensors("optimizer"))
    if learner.ema:
        backend.load(learner.ema.weights, checkpoint.tensors("ema"))
    backend.load({"window": learner.window}, {"window": torch.tensor(checkpoint.state.window)})
    learner.set_steps_done(checkpoint.state.step)
    backend.load_state({"scaler": checkpoint.state.scaler})
    if len(checkpoint.state.random) == backend.world_size:
        backend.load_state({"random": checkpoint.state.random[backend.rank]})
    return learner


def load_weights(model: torch.nn.Module, weights: Mapping[str, torch.Tensor], source: str) -> None:
    """Loads whole weights strictly. Raises CheckpointError naming what does not fit."""
    own = {**dict(model.named_parameters()), **_persistent_buffers(model)}
    missing, extra = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
    wrong = [
        f"{name} is {tuple(weights[name].shape)}, expected {tuple(own[name].shape)}"
        for name in sorted(own.keys() & weights.keys())
        if weights[name].shape != own[name].shape
    ]
    problems = [f"lacks {name}" for name in missing[:1]]
    problems += [f"has an unknown {name}" for name in extra[:1]]
    problems += wrong[:1]
    if problems:
        count = len(missing) + len(extra) + len(wrong)
        raise CheckpointError(
            f"{source} does not fit this model: it {'; '.join(problems)} ({count} differences).",
            "Use the task and the size it was trained with.",
        )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(weights[name])


def _persistent_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    kept = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}
