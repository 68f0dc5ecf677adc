"""A trained EIT network at work: from measured voltages to images."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import nn

from tpukit.errors import CheckpointError, ConfigError
from tpukit.hardware.backend import Backend
from tpukit.tasks.eit.data.conditioning import voltage_map
from tpukit.tasks.eit.data.dataset import DEFAULT_FOLDER, data_normalisation
from tpukit.tasks.eit.data.normalisation import Normalisation
from tpukit.tasks.eit.model.published import load_published
from tpukit.tasks.eit.progress import Progress
from tpukit.tasks.eit.task import EITTask
from tpukit.tasks.registry import make_task
from tpukit.train.requests import EvaluationRequest

Images = NDArray[np.float32]

ROWS_PER_DEVICE = 16


def open_task(request: EvaluationRequest) -> tuple[EITTask, Normalisation]:
    """The task of the run, or the published one, and the normalisation it learned with."""
    steps = {} if request.sampling_steps is None else {"sampling_steps": request.sampling_steps}
    if request.run is not None:
        task = make_task(EITTask, {**request.run.task_config, **steps}, "")
        task.restore_artifacts(request.run.checkpoint.artifacts())
    else:
        task = EITTask(size="published", **steps)
        task.normalisation = data_normalisation(request.data_path or DEFAULT_FOLDER)
    assert isinstance(task, EITTask)
    if task.normalisation is None:
        raise CheckpointError("The run keeps no normalisation.", "Use another checkpoint.")
    return task, task.normalisation


def sample_images(
    request: EvaluationRequest, backend: Backend, task: EITTask, ys: Images
) -> tuple[Images, Images]:
    """The mean of each frame's K sampled images, and the first of them: (n, 128, 128) twice.

    `ys`: (n, 208) volts. Every process must call it.
    """
    normalisation = task.normalisation
    assert normalisation is not None
    maps = voltage_map(ys, normalisation.mean, normalisation.std)[:, None]
    model = _load_model(request, backend, task)
    draws = len(maps) * request.samples
    sampler = task.sampler(_rows(request, backend, draws), seed=request.seed)
    single = np.zeros((len(maps), sampler.side, sampler.side), np.float32)
    total = np.zeros(single.shape, np.float64)
    with Progress("reconstructing", draws, silent=not backend.is_main) as progress:
        for draw, image in sampler.images(model, backend, maps, request.samples):
            total[draw.sample] += image
            if draw.repeat == 0:
                single[draw.sample] = image
            progress.advance(1)
    return (total / request.samples).astype(np.float32), single


def _load_model(request: EvaluationRequest, backend: Backend, task: EITTask) -> nn.Module:
    model = task.build_model(backend)
    if request.run is not None:
        model.load_state_dict(request.run.weights())
    elif request.checkpoint is not None:
        load_published(model, request.checkpoint)
    prepared = backend.prepare(model, train=False)
    prepared.eval()
    return prepared


def _rows(request: EvaluationRequest, backend: Backend, draws: int) -> int:
    """Images sampled at once: a multiple of the devices, no more than there are to draw."""
    devices = backend.devices
    if request.batch_size is None:
        return devices * min(ROWS_PER_DEVICE, -(-draws // devices))
    if request.batch_size < 1 or request.batch_size % devices:
        raise ConfigError(
            f"--batch-size {request.batch_size} does not divide over {devices} devices.",
            f"Nearest: {max(devices, round(request.batch_size / devices) * devices)}.",
        )
    return request.batch_size
