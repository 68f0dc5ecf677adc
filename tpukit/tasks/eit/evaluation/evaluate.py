"""`tpukit test` for EIT: reconstructs a set, and compares with the truth and with baselines."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tpukit.hardware.backend import Backend
from tpukit.tasks.eit.data.dataset import DEFAULT_FOLDER
from tpukit.tasks.eit.data.measured import TestSet, check_units, open_test_set
from tpukit.tasks.eit.evaluation.baseline import noser, tikhonov
from tpukit.tasks.eit.evaluation.metrics import METRICS, Summary, Values, measure_all, summarise
from tpukit.tasks.eit.evaluation.pictures import draw_grid, save_predictions
from tpukit.tasks.eit.evaluation.reconstruction import open_task, sample_images
from tpukit.tasks.eit.npz import write_whole
from tpukit.tasks.eit.simulation.generate import writing_errors
from tpukit.tasks.eit.task import EITTask
from tpukit.train.requests import EvaluationRequest

Images = NDArray[np.float32]
Tell = Callable[[str], None]

SHOWN = 12
"""Rows of the picture."""
CALIBRATION = (
    "The simulation's ranges of contrast, size and noise were chosen after looking at the measured "
    "voltages of these sets."
)


@dataclass(frozen=True)
class Reconstructed:
    """One way's images of all frames."""

    label: str
    """In the picture and in text."""
    suffix: str
    """Of its metrics' names in JSON: `correlation`, `correlation_baseline`, ..."""
    images: Images


def evaluate(request: EvaluationRequest, backend: Backend, tell: Tell) -> dict[str, Any]:
    """The JSON fields of `tpukit test`. Every process must call it; the main one writes."""
    task, normalisation = open_task(request)
    data = request.data or "simulated"
    path = request.data_path or _path_of_run(request)
    frames = open_test_set(data, path, tell, request.limit)
    warning = check_units(frames, normalisation)
    if warning:
        tell(f"warning: {warning}")
    out = request.out or _usual_folder(request, data)
    if backend.is_main:
        with writing_errors(out):
            out.mkdir(parents=True, exist_ok=True)
    ways = _reconstruct(request, backend, task, frames)
    if not backend.is_main:
        return {}
    with writing_errors(out):
        return _report(frames, ways, data, out, tell)


def _path_of_run(request: EvaluationRequest) -> Path | None:
    """Where the run's data was, for its own test split."""
    if request.run is None or request.data not in {None, "simulated"}:
        return None
    return Path(request.run.train_config.get("data_path", DEFAULT_FOLDER))


def _usual_folder(request: EvaluationRequest, data: str) -> Path:
    name = f"test-{Path(data).name}"
    return request.run.path / name if request.run else Path("results") / name


# -- images ----------------------------------------------------------------------------------------


def _reconstruct(
    request: EvaluationRequest,
    backend: Backend,
    task: EITTask,
    frames: TestSet,
) -> list[Reconstructed]:
    """Ours first: the mean of K samples (the one sample where K is 1), then a single one."""
    mean, single = sample_images(request, backend, task, frames.ys)
    label = "ours" if request.samples == 1 else f"ours, mean of {request.samples}"
    ways = [Reconstructed(label, "", mean)]
    if request.samples > 1:
        ways.append(Reconstructed("ours, one sample", "_single", single))
    degrees = frames.electrode_degrees
    ways.append(Reconstructed("Tikhonov", "_baseline", tikhonov(degrees).images(frames.ys)))
    ways.append(Reconstructed("NOSER", "_noser", noser(degrees).images(frames.ys)))
    return ways


# -- figures ---------------------------------------------------------------------------------------


def _report(
    frames: TestSet, ways: list[Reconstructed], data: str, out: Path, tell: Tell
) -> dict[str, Any]:
    """Writes predictions, pictures and figures; returns the JSON fields."""
    images = {f"images{way.suffix}": way.images for way in ways}
    truth = {} if frames.xs is None else {"truth": frames.xs}
    save_predictions(out, {**images, **truth}, frames.names)
    result: dict[str, Any] = {
        "task": "eit",
        "data": data,
        "samples": len(frames.names),
        "metrics": {},
        "intervals": {},
        "predictions": str(out / "predictions.npz"),
        "picture": str(out / "reconstructions.png"),
    }
    figures = (
        {} if frames.xs is None else {w.suffix: measure_all(w.images, frames.xs) for w in ways}
    )
    _draw(frames, ways, figures, out)
    if frames.xs is None:
        tell(f"{frames.title} has no images to compare with: no metrics.")
    else:
        for name, summary in _summaries(figures).items():
            result["metrics"][name] = summary.mean
            result["intervals"][name] = [summary.low, summary.high]
        _write_table(out / "metrics.csv", frames.names, figures)
        result["per_sample"] = str(out / "metrics.csv")
        _tell_figures(frames, ways, result, tell)
    tell(f"Picture: {result['picture']}; predictions: {result['predictions']} (and .mat)")
    return result


def _summaries(figures: dict[str, dict[str, Values]]) -> dict[str, Summary]:
    return {
        f"{metric}{suffix}": summarise(values)
        for suffix, measured in figures.items()
        for metric, values in measured.items()
    }


def _draw(
    frames: TestSet, ways: list[Reconstructed], figures: dict[str, dict[str, Values]], out: Path
) -> None:
    shown = slice(0, SHOWN)
    columns: dict[str, Images] = {} if frames.xs is None else {"truth": frames.xs[shown]}
    # The baselines stand between the truth and ours.
    ordered = [w for w in ways if w.suffix in {"_baseline", "_noser"}][:1]
    ordered += [w for w in ways if w.suffix in {"", "_single"}]
    columns |= {way.label: way.images[shown] for way in ordered}
    notes = {
        way.label: [f"corr. {value:.2f}" for value in figures[way.suffix]["correlation"][shown]]
        for way in ordered
        if figures
    }
    caption = f"{frames.title}. {CALIBRATION}" if frames.real else frames.title
    draw_grid(out / "reconstructions.png", columns, frames.names[shown], notes, caption)


def _write_table(path: Path, names: list[str], figures: dict[str, dict[str, Values]]) -> None:
    """A row a sample, a column a metric and way."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    columns = {f"{m}{s}": v for s, measured in figures.items() for m, v in measured.items()}
    writer.writerow(["sample", *columns])
    for row, name in enumerate(names):
        writer.writerow([name, *(f"{values[row]:.6g}" for values in columns.values())])
    write_whole(path, stream.getvalue().encode())


def _tell_figures(
    frames: TestSet, ways: list[Reconstructed], result: dict[str, Any], tell: Tell
) -> None:
    tell(f"{frames.title}: {len(frames.names)} samples; mean and 95 % interval")
    tell(f"{'':20}" + "".join(f"{name:>26}" for name in METRICS))
    for way in ways:
        cells = []
        for metric in METRICS:
            name = f"{metric}{way.suffix}"
            low, high = result["intervals"][name]
            cells.append(f"{result['metrics'][name]:.3f} [{low:.3f}, {high:.3f}]")
        tell(f"{way.label:20}" + "".join(f"{cell:>26}" for cell in cells))
    tell("PSNR as published: on x/2 + 1/2, its peak that of each true image.")
    if frames.real:
        tell(CALIBRATION)
