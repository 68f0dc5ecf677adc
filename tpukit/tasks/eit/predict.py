"""`tpukit predict` for EIT: the images of a folder of measurements, in one file."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from torch import nn

from tpukit.errors import ConfigError
from tpukit.hardware.backend import Backend
from tpukit.io.files import write_file, writing_errors
from tpukit.tasks.eit.data.measured import open_test_set
from tpukit.tasks.eit.pictures import encode_matlab, encode_predictions
from tpukit.tasks.eit.reconstruction import run_data_path, sample_images
from tpukit.tasks.eit.task import EITTask, Log
from tpukit.train.requests import EvaluationRequest, PredictionRequest

ENCODERS = {".npz": encode_predictions, ".mat": encode_matlab}


def image_file(request: PredictionRequest) -> Path:
    """The file to write. Raises ConfigError where it has no known suffix, or needs columns."""
    if request.sample_submission is not None:
        raise ConfigError("--sample-submission: images are no table of ids.", "Leave it out.")
    out = request.out or Path("images.npz")
    if out.suffix not in ENCODERS:
        raise ConfigError(f"--out {out}: images go to an .npz or a .mat file.")
    return out


def predict_images(
    task: EITTask, model: nn.Module, backend: Backend, request: PredictionRequest, log: Log
) -> dict[str, Any]:
    """Reconstructs every sample of a folder, the run's own test split by default.

    Writes `images` and `names`; returns the JSON fields of `predict`.
    """
    started = time.monotonic()
    out = image_file(request)
    frames = open_test_set(str(request.data_path or run_data_path(task, log)), None)
    made = sample_images(task, model, backend, frames, EvaluationRequest(request.run), log)
    if backend.is_main:
        with writing_errors(out.parent):
            out.parent.mkdir(parents=True, exist_ok=True)
            write_file(out, ENCODERS[out.suffix]({"images": made.mean}, frames.names))
    seconds = time.monotonic() - started
    log(f"{len(made.mean):,} images in {out}, {seconds:.1f} s")
    return {"rows": len(made.mean), "path": str(out), "seconds": seconds}
