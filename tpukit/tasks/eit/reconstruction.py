"""Images from measured voltages by a trained network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from torch import nn

from tpukit.errors import ConfigError
from tpukit.hardware.backend import Backend
from tpukit.io.progress import Progress
from tpukit.tasks.eit.data.conditioning import voltage_map
from tpukit.tasks.eit.data.dataset import DEFAULT_FOLDER, data_normalisation
from tpukit.tasks.eit.data.measured import TestSet, check_units
from tpukit.tasks.eit.data.symmetry import SYMMETRIES
from tpukit.tasks.eit.metrics import correlation
from tpukit.tasks.eit.model.diffusion import Reconstructions, View
from tpukit.tasks.eit.settings import SamplingOptions
from tpukit.tasks.eit.task import EITTask, Log
from tpukit.train.requests import EvaluationRequest

ROWS_PER_DEVICE = 16
COMPARED = 16
"""Frames on which it is seen whether the network treats symmetric measurements alike."""
ALIKE = 0.5
"""Least correlation of images of symmetric measurements, in the mean over frames."""


def run_data_path(task: EITTask, log: Log) -> Path:
    """The run's data path, or `./data` where that does not exist."""
    path = Path(task.config.data_path)
    if path.is_dir() or path == DEFAULT_FOLDER:
        return path
    log(f"{path}, the data of the run, is not there; using ./{DEFAULT_FOLDER}.")
    return DEFAULT_FOLDER


def sample_images(
    task: EITTask,
    model: nn.Module,
    backend: Backend,
    frames: TestSet,
    request: EvaluationRequest,
    log: Log,
) -> Reconstructions:
    """`samples` images of each frame. They see it turned and mirrored where the network follows the
    electrodes' symmetries. Every rank must call it."""
    options = request.options or SamplingOptions()
    normalisation = task.normalisation or data_normalisation(request.data_path or DEFAULT_FOLDER)
    warning = check_units(frames, normalisation)
    if warning:
        log(f"warning: {warning}")
    mean, std = normalisation.mean, normalisation.std
    views = [
        View(voltage_map(symmetry.of_voltages(frames.ys), mean, std)[:, None], symmetry)
        for symmetry in SYMMETRIES[: options.samples]
    ]
    draws = len(frames.ys) * options.samples
    batch_size = _batch_size(request.batch_size, backend.devices, draws)
    sampler = task.sampler(batch_size, steps=options.sampling_steps, seed=request.seed)
    if len(views) > 1 and not _treats_alike(task, model, backend, views, batch_size):
        log("Turned and mirrored measurements give other images: the network sees none of them.")
        views = views[:1]
    with Progress("reconstructing", draws, enabled=backend.is_main) as progress:
        return sampler.reconstruct(model, backend, views, options.samples, progress.advance)


def _treats_alike(
    task: EITTask, model: nn.Module, backend: Backend, views: Sequence[View], batch_size: int
) -> bool:
    """Whether the first frames' images, of one sampling step, are the same in every view.

    They are not where the electrodes of the training data came in another order.
    """
    few = [replace(view, maps=view.maps[:COMPARED]) for view in views]
    sampler = task.sampler(batch_size, steps=1)
    made = [image for _, image in sampler.images(model, backend, few, len(few))]
    images = np.stack(made).reshape(-1, len(few), *made[0].shape)
    likeness = [correlation(images[:, k], images[:, 0]).mean() for k in range(1, len(few))]
    return bool(min(likeness) >= ALIKE)


def _batch_size(asked: int | None, devices: int, draws: int) -> int:
    """A multiple of the devices; by default no more than there are images to sample."""
    if asked is None:
        return devices * min(ROWS_PER_DEVICE, -(-draws // devices))
    if asked < 1 or asked % devices:
        raise ConfigError(
            f"--batch-size {asked} does not divide over {devices} devices.",
            f"Nearest: {max(devices, round(asked / devices) * devices)}.",
        )
    return asked
