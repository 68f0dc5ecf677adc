"""`tpukit test` for EIT: reconstructs a test set, compares with the truth and with baselines."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tpukit.io.files import write_file, writing_errors
from tpukit.io.tables import write_csv
from tpukit.tasks.eit.baseline import noser, tikhonov
from tpukit.tasks.eit.data.measured import TestSet, open_test_set
from tpukit.tasks.eit.metrics import RANGES, Values, measure_all, pooled_rmse
from tpukit.tasks.eit.model.diffusion import Reconstructions
from tpukit.tasks.eit.pictures import ENCODERS, draw_grid
from tpukit.tasks.eit.predict import Log, Trained, sample_images
from tpukit.tasks.eit.settings import SamplingOptions
from tpukit.train.evaluation import mean_interval
from tpukit.train.requests import EvaluationRequest

Images = NDArray[np.float32]

ROWS = 8
"""Most frames in the picture."""
CALIBRATION = (
    "The simulation's ranges of contrast, size and noise were chosen after looking at the measured "
    "voltages of these sets."
)


@dataclass(frozen=True)
class Reconstructed:
    """All frames reconstructed in one way."""

    label: str
    """Name in the picture and in text."""
    suffix: str
    """Suffix of its metrics' names in JSON: `correlation_baseline` has `_baseline`."""
    images: Images


def evaluate_images(trained: Trained, request: EvaluationRequest, log: Log) -> dict[str, Any]:
    """The JSON fields of `tpukit test`. Every rank must call it; rank 0 writes."""
    data = request.data or "simulated"
    path = request.data_path
    if path is None and data == "simulated" and request.run is not None:
        path = Path(trained.config.data_path)
    frames = open_test_set(data, path, request)
    out = request.folder(data)
    if trained.backend.is_main:
        with writing_errors(out):
            out.mkdir(parents=True, exist_ok=True)
    samples = (request.options or SamplingOptions()).samples
    made = sample_images(trained, frames, request, log)
    if not trained.backend.is_main:
        return {}
    with writing_errors(out):
        named = request.named(data)
        return _report(frames, _with_baselines(frames, made, samples), named, out, log)


def _with_baselines(frames: TestSet, made: Reconstructions, samples: int) -> list[Reconstructed]:
    """Ours first: the mean of K samples (the one sample where K is 1), then a single one."""
    label = "ours" if samples == 1 else f"ours, mean of {samples}"
    ways = [Reconstructed(label, "", made.mean)]
    if samples > 1:
        ways.append(Reconstructed("ours, one sample", "_single", made.single))
    degrees = frames.electrode_degrees
    ways.append(Reconstructed("Tikhonov", "_baseline", tikhonov(degrees).images(frames.ys)))
    ways.append(Reconstructed("NOSER", "_noser", noser(degrees).images(frames.ys)))
    return ways


# -- metrics -------------------------------------------------------------------------------------
def _report(
    frames: TestSet, ways: list[Reconstructed], data: str, out: Path, log: Log
) -> dict[str, Any]:
    """Writes predictions, picture and metrics; returns the JSON fields."""
    images = {f"images{way.suffix}": way.images for way in ways}
    truth = {} if frames.xs is None else {"truth": frames.xs}
    for suffix, encode in ENCODERS.items():
        write_file(out / f"predictions{suffix}", encode({**images, **truth}, frames.names))
    result: dict[str, Any] = {
        "task": "eit",
        "data": data,
        "samples": len(frames.names),
        "metrics": {},
        "methods": {way.suffix.removeprefix("_"): way.label for way in ways},
        "intervals": {},
        "predictions": str(out / "predictions.npz"),
        "picture": str(out / "reconstructions.png"),
    }
    measured = {
        f"{metric}{way.suffix}": values
        for way in ways
        if frames.xs is not None
        for metric, values in measure_all(way.images, frames.xs).items()
    }
    _draw(frames, ways, measured, Path(result["picture"]))
    if frames.xs is None:
        log(f"{frames.title}: no metrics, as not every file has an image (`xs`) to compare with.")
    else:
        for name, values in measured.items():
            metric, way, suffix = name.partition("_")
            result["metrics"][name] = float(values.mean())
            if interval := mean_interval(values, *RANGES.get(metric, ())):
                result["intervals"][name] = interval
            if metric == "rmse":
                result["metrics"][f"rmse_pooled{way}{suffix}"] = pooled_rmse(values)
        rows = zip(frames.names, *measured.values(), strict=True)
        table = ([name, *(f"{value:.6g}" for value in row)] for name, *row in rows)
        write_csv(out / "metrics.csv", [["sample", *measured], *table])
        result["per_sample"] = str(out / "metrics.csv")
        log(f"{frames.title}: {len(frames.names)} samples")
        log("PSNR as published: on x/2 + 1/2, its peak that of each true image.")
        log("RMSE, all frames, as published: one root over all frames.")
        if frames.real:
            log(CALIBRATION)
    log(f"Picture: {result['picture']}; predictions: {result['predictions']} (and .mat)")
    return result


def _draw(
    frames: TestSet, ways: list[Reconstructed], measured: dict[str, Values], path: Path
) -> None:
    """A picture of the first frames."""
    rows = slice(0, ROWS)
    columns: dict[str, Images] = {} if frames.xs is None else {"truth": frames.xs[rows]}
    # The baselines stand between the truth and ours.
    ordered = [w for w in ways if w.suffix in {"_baseline", "_noser"}][:1]
    ordered += [w for w in ways if w.suffix in {"", "_single"}]
    columns |= {way.label: way.images[rows] for way in ordered}
    notes = {
        way.label: [f"corr. {value:.2f}" for value in measured[f"correlation{way.suffix}"][rows]]
        for way in ordered
        if measured
    }
    names = frames.names[rows]
    caption = f"{frames.title}, frames 1 to {len(names)} of {len(frames.names):,}."
    caption += f" {CALIBRATION}" if frames.real else ""
    draw_grid(path, columns, names, notes, caption)
