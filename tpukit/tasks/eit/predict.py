"""`tpukit predict` for EIT: images from measured voltages by a trained network, in one file."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from tpukit.errors import ConfigError
from tpukit.hardware.backend import Backend
from tpukit.io.files import write_file, writing_errors
from tpukit.io.progress import Progress
from tpukit.tasks.eit.data.dataset import DEFAULT_FOLDER, Normalisation, data_normalisation
from tpukit.tasks.eit.data.measured import KNOWN, TestSet, check_units, open_test_set
from tpukit.tasks.eit.data.voltages import SYMMETRIES, voltage_map
from tpukit.tasks.eit.metrics import correlation
from tpukit.tasks.eit.model.diffusion import Diffusion, Reconstructions, Sampler, View
from tpukit.tasks.eit.pictures import ENCODERS
from tpukit.tasks.eit.settings import EITConfig, SamplingOptions
from tpukit.train.requests import EvaluationRequest, PredictionRequest

Log = Callable[[str], None]
ROWS_PER_DEVICE = 16
COMPARED = 16
"""Frames on which it is seen whether the network treats symmetric measurements alike."""
ALIKE = 0.5
"""Least correlation of images of symmetric measurements, in the mean over frames."""


@dataclass(frozen=True)
class Trained:
    """A run's network on its devices."""

    model: nn.Module
    backend: Backend
    config: EITConfig
    normalisation: Normalisation | None
    """The run's; None: the data's."""

    def sampler(self, rows: int, *, steps: int | None = None, seed: int = 0) -> Sampler:
        """Samples images in batches of `rows` over all ranks."""
        chosen = Diffusion().sampling_steps(steps or self.config.sampling_steps)
        return Sampler(chosen, self.config.network.image_side, rows, seed)


def sample_images(
    trained: Trained, frames: TestSet, request: EvaluationRequest, log: Log
) -> Reconstructions:
    """`samples` images of each frame. They see it turned and mirrored where the network follows the
    electrodes' symmetries. Every rank must call it."""
    options, backend = request.options or SamplingOptions(), trained.backend
    named = Path(request.data) if request.data and request.data not in KNOWN else DEFAULT_FOLDER
    normalisation = trained.normalisation or data_normalisation(request.data_path or named)
    if warning := check_units(frames, normalisation):
        log(f"Warning: {warning}")
    mean, std = normalisation.mean, normalisation.std
    views = [
        View(voltage_map(symmetry.of_voltages(frames.ys), mean, std)[:, None], symmetry)
        for symmetry in SYMMETRIES[: options.samples]
    ]
    draws = len(frames.ys) * options.samples
    batch_size = _batch_size(request.batch_size, backend.devices, draws)
    sampler = trained.sampler(batch_size, steps=options.sampling_steps, seed=request.seed)
    if len(views) > 1 and not _treats_alike(trained, views, batch_size):
        log("Turned and mirrored measurements give other images: the network sees none of them.")
        views = views[:1]
    with Progress("reconstructing", draws, enabled=backend.is_main) as progress:
        return sampler.reconstruct(trained.model, backend, views, options.samples, progress.advance)


def _treats_alike(trained: Trained, views: Sequence[View], batch_size: int) -> bool:
    """Whether the first frames' images, of one sampling step, are the same in every view.

    They are not where the electrodes of the training data came in another order.
    """
    few = [replace(view, maps=view.maps[:COMPARED]) for view in views]
    sampler = trained.sampler(batch_size, steps=1)
    made = [image for _, image in sampler.images(trained.model, trained.backend, few, len(few))]
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


# -- predict ---------------------------------------------------------------------------------------
def image_file(request: PredictionRequest) -> Path:
    """The file to write. Raises ConfigError where it has no known suffix, or needs columns."""
    if request.sample_submission is not None:
        raise ConfigError("--sample-submission: images are no table of ids.", "Leave it out.")
    out = request.out or Path("images.npz")
    if out.suffix not in ENCODERS:
        raise ConfigError(f"--out {out}: images go to an .npz or a .mat file.")
    return out


def predict_images(trained: Trained, request: PredictionRequest, log: Log) -> dict[str, Any]:
    """Reconstructs every sample of a folder, the run's own test split by default.

    Writes `images` and `names`; returns the JSON fields of `predict`.
    """
    started = time.monotonic()
    out = image_file(request)
    frames = open_test_set(request.data_path or Path(trained.config.data_path))
    made = sample_images(trained, frames, EvaluationRequest(request.run), log)
    if trained.backend.is_main:
        with writing_errors(out.parent):
            out.parent.mkdir(parents=True, exist_ok=True)
            write_file(out, ENCODERS[out.suffix]({"images": made.mean}, frames.names))
    seconds = time.monotonic() - started
    log(f"{len(made.mean):,} images in {out}, {seconds:.1f} s")
    return {"rows": len(made.mean), "path": str(out), "seconds": seconds}
