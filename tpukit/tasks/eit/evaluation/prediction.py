"""`tpukit predict` for EIT: the images of a folder of measurements, in one file."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tpukit.errors import ConfigError
from tpukit.hardware.backend import Backend
from tpukit.tasks.eit.data.dataset import DEFAULT_FOLDER
from tpukit.tasks.eit.data.measured import check_units, open_test_set
from tpukit.tasks.eit.evaluation.pictures import encode_matlab, encode_predictions
from tpukit.tasks.eit.evaluation.reconstruction import open_task, sample_images
from tpukit.tasks.eit.npz import write_whole
from tpukit.tasks.eit.simulation.generate import writing_errors
from tpukit.train.requests import EvaluationRequest

ENCODERS = {".npz": encode_predictions, ".mat": encode_matlab}


def predict_images(
    request: EvaluationRequest, backend: Backend, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Reconstructs every sample of `request.data` and writes `images` and `names` to `request.out`.

    Returns the JSON fields of `predict`. Every process must call it; the main one writes.
    """
    started = time.monotonic()
    out = request.out or Path("images.npz")
    if out.suffix not in ENCODERS:
        raise ConfigError(f"--out {out}: images go to an .npz or a .mat file.")
    task, normalisation = open_task(request)
    frames = open_test_set(str(_folder(request)), None, tell, request.limit)
    warning = check_units(frames, normalisation)
    if warning:
        tell(f"warning: {warning}")
    images, _ = sample_images(request, backend, task, frames.ys)
    if backend.is_main:
        with writing_errors(out.parent):
            out.parent.mkdir(parents=True, exist_ok=True)
            write_whole(out, ENCODERS[out.suffix]({"images": images}, frames.names), sync=True)
    seconds = time.monotonic() - started
    tell(f"{len(images):,} images in {out}, {seconds:.1f} s")
    return {"rows": len(images), "path": str(out), "seconds": seconds}


def _folder(request: EvaluationRequest) -> Path:
    """The folder asked for, else where the run's data was."""
    if request.data_path is not None:
        return request.data_path
    known = request.run.train_config if request.run else {}
    return Path(known.get("data_path", DEFAULT_FOLDER))
