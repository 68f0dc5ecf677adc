"""Images from measured voltages by a trained network."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from tpukit.errors import ConfigError
from tpukit.hardware.backend import Backend
from tpukit.io.progress import Progress
from tpukit.tasks.eit.data.conditioning import voltage_map
from tpukit.tasks.eit.data.dataset import DEFAULT_FOLDER, data_normalisation
from tpukit.tasks.eit.data.measured import TestSet, check_units
from tpukit.tasks.eit.model.diffusion import Reconstructions
from tpukit.tasks.eit.task import EITTask, Log
from tpukit.train.requests import EvaluationRequest

ROWS_PER_DEVICE = 16


def run_data_path(task: EITTask, log: Log) -> Path:
    """Where the run's data was, or `./data` where that does not exist."""
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
    """`request.samples` images of each frame. Every rank must call it."""
    normalisation = task.normalisation or data_normalisation(request.data_path or DEFAULT_FOLDER)
    warning = check_units(frames, normalisation)
    if warning:
        log(f"warning: {warning}")
    maps = voltage_map(frames.ys, normalisation.mean, normalisation.std)[:, None]
    draws = len(maps) * request.samples
    batch_size = _batch_size(request.batch_size, backend.devices, draws)
    sampler = task.sampler(batch_size, steps=request.sampling_steps, seed=request.seed)
    with Progress("reconstructing", draws, enabled=backend.is_main) as progress:
        return sampler.reconstruct(model, backend, maps, request.samples, progress.advance)


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
