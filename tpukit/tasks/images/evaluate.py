"""`tpukit test` for image classifiers: accuracy, confusion matrix, the worst mistakes."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from tpukit.errors import DataError
from tpukit.hardware.backend import Backend, Batch
from tpukit.hardware.prefetch import loader_workers
from tpukit.io.files import writing_errors
from tpukit.io.process import WorkerInit
from tpukit.io.tables import read_table, write_csv
from tpukit.tasks.images.data import listing
from tpukit.tasks.images.data.files import check_headers, name_files
from tpukit.tasks.images.data.listing import LabelledImages
from tpukit.tasks.images.pictures import draw_confusion, draw_mistakes
from tpukit.tasks.images.training import ImageTraining
from tpukit.train.evaluation import infer
from tpukit.train.labelled import labelled
from tpukit.train.loader import LoaderSettings
from tpukit.train.metric_names import MetricName, parse_metrics
from tpukit.train.metrics import named_metrics
from tpukit.train.requests import EvaluationRequest
from tpukit.train.submission import scored_rows
from tpukit.train.target import DEFAULT_METRICS

Log = Callable[[str], None]
Probabilities = NDArray[np.float32]
SHOWN_MISTAKES = 12
ROWS_PER_DEVICE = 64
"""Rows of an evaluation batch on each device."""


def evaluate_classes(
    task: ImageTraining, model: nn.Module, backend: Backend, request: EvaluationRequest, log: Log
) -> dict[str, Any]:
    """The JSON fields of `tpukit test`. Every rank must call it; rank 0 writes."""
    images = _test_images(task, request, log)
    task.require_seen_views(request.run.path if request.run else "the model")
    images = images.part(request.chosen(range(len(images))))
    if task.settings.damaged == "stop":
        check_headers(images.files, values=task.values)
    predicted = predictions_of(task, model, backend, images, request.batch_size)
    readable = np.isfinite(predicted).all(1)
    if not backend.is_main:
        return {}
    damaged = images.part(np.flatnonzero(~readable)).files
    if damaged:
        named = name_files(damaged)
        log(f"{len(damaged)} of {len(images)} images cannot be read and are left out: {named}.")
    if len(damaged) == len(images):
        raise DataError("no image is left to test.", "Name others: --data FOLDER")
    images = images.part(np.flatnonzero(readable))
    data = request.data or "valid"
    out = request.folder(data)
    with writing_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        asked, named = request.metrics(), request.named(data)
        fields = _report(task, images, predicted[readable], asked, out, named, log)
    return {**fields, "damaged": [*damaged]}


def predictions_of(
    task: ImageTraining, model: nn.Module, backend: Backend, images: LabelledImages,
    batch_size: int | None = None,
) -> NDArray[np.float32]:  # fmt: skip
    """(images, predicted); NaN where an image cannot be read.

    The ranks and their DataLoader workers share the work.
    """

    def forward(batch: Batch) -> Tensor:
        found: Tensor = backend.call(model, task.predictions, batch)
        return found

    rows = (batch_size or ROWS_PER_DEVICE * backend.devices) // backend.devices or 1
    loading = LoaderSettings(loader_workers(backend), 0, WorkerInit())
    return infer(task, task.samples(images), forward, backend, rows, loading)


def _test_images(task: ImageTraining, request: EvaluationRequest, log: Log) -> LabelledImages:
    """The run's validation images, or a folder or table with labels."""
    home = str(request.data_path or task.settings.data_path)
    config, known = replace(task.settings, data_path=home), task.predicts
    if request.data in (None, "valid"):
        train, valid = listing.find_training_images(config, known)
        if not len(valid):
            raise DataError("the data has no validation images.", "Name others: --data FOLDER")
        learned = request.run.checkpoint.state.identity.get("data") if request.run else None
        if learned not in (None, f"{train.digest()}{valid.digest()}"):
            log("Warning: these are not the images or the parts that the run was trained with:"
                " it may have learned some of those that it is tested on.")  # fmt: skip
        return valid
    if request.data == "train":
        return listing.find_training_images(config, known)[0]
    for path in (Path(request.data or ""), Path(config.data_path) / (request.data or "")):
        if path.is_dir():
            return listing.read_class_folders(path, known)
        if path.is_file():
            # Of any part: an id that two of them have is an error.
            folder = listing.named_folder(config) or Path(config.data_path)
            columns = task.beside.columns if task.beside else ()
            rows = labelled(read_table(path), config, known)
            return listing.labelled_images(rows, folder, columns)
    raise DataError(
        f"--data {request.data}: there is no such folder or table.",
        "Give valid, train, a folder of class folders, or a CSV of ids and labels.",
    )


# -- metrics -------------------------------------------------------------------------------------
def accuracies(probabilities: Probabilities, labels: NDArray[np.int64]) -> dict[str, float]:
    """Top-1, top-5 (of more than five classes), the mean of the classes' own, and the loss."""
    names = "accuracy,balanced_accuracy,log_loss" + ",top@5" * (probabilities.shape[1] > 5)
    titles = {"log_loss": "loss", "top@5": "top5_accuracy"}
    rows: dict[str, NDArray[Any]] = {
        "target": labels, "prediction": np.nan_to_num(probabilities)
    }  # fmt: skip
    found = named_metrics(parse_metrics(names), rows)
    return {titles.get(name, name): value for name, value in found.items()}


def proportion_interval(share: float, count: int) -> list[float]:
    """95 % confidence interval of a proportion (Wilson, 1927)."""
    from scipy.stats import binomtest

    ends = binomtest(round(share * count), count).proportion_ci(method="wilson")
    return [float(ends.low), float(ends.high)]


def _report(
    task: ImageTraining, images: LabelledImages, predicted: NDArray[np.float32],
    asked: Sequence[MetricName], out: Path, data: str, log: Log,
) -> dict[str, Any]:  # fmt: skip
    """Writes predictions and, of classes, pictures; the JSON fields."""
    target, values, path = images.target, images.values, out / "predictions.csv"
    write_csv(path, scored_rows(target, images.names, values, predicted, {"file": images.files}))
    fields: dict[str, Any] = {"task": task.name, "data": data, "samples": len(images)}
    if target.kind == "class":
        fields |= _report_classes(task, images, predicted, asked, out, log)
    else:
        names = list(dict.fromkeys([*parse_metrics(DEFAULT_METRICS[target.kind]), *asked]))
        rows = {"target": values, "prediction": predicted.reshape(values.shape)}
        found = named_metrics(names, rows, target)
        metrics = {name: value for name, value in found.items() if np.isfinite(value)}
        text = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        log(f"{len(images)} images, {target}: {text}")
        fields |= {"metrics": metrics, "intervals": {}, "pictures": []}
    pictures = f"Pictures: {', '.join(fields['pictures'])}; predictions"
    log(f"{pictures if fields['pictures'] else 'Predictions'}: {path}")
    return {**fields, "predictions": str(path)}


def _report_classes(
    task: ImageTraining, images: LabelledImages, probabilities: Probabilities,
    asked: Sequence[MetricName], out: Path, log: Log,
) -> dict[str, Any]:  # fmt: skip
    labels = images.values
    predicted = probabilities.argmax(1)
    metrics = accuracies(probabilities, labels)
    chosen = named_metrics(asked, {"target": labels, "prediction": probabilities})
    metrics |= {name: value for name, value in chosen.items() if np.isfinite(value)}
    counted = [name for name in ("accuracy", "top5_accuracy") if name in metrics]
    intervals = {name: proportion_interval(metrics[name], len(labels)) for name in counted}
    confusion, mistakes = out / "confusion.png", out / "mistakes.png"
    classes = len(images.classes)
    # (classes, classes): images of a row's class that were given a column's.
    counts = np.bincount(labels * classes + predicted, minlength=classes**2)
    draw_confusion(confusion, counts.reshape(classes, classes), images.classes)
    worst = worst_mistakes(probabilities, labels)[:SHOWN_MISTAKES]
    draw_mistakes(mistakes, images, probabilities, worst, task.input.side, task.values)
    low, high = intervals["accuracy"]
    log(
        f"{len(images)} images of {len(images.classes)} classes: accuracy"
        f" {metrics['accuracy']:.1%} [{low:.1%}, {high:.1%}]"
        + (f", top-5 {metrics['top5_accuracy']:.1%}" if "top5_accuracy" in metrics else "")
        + f", mean over classes {metrics['balanced_accuracy']:.1%}"
        + "".join(f", {name} {value:.4g}" for name, value in chosen.items())
    )
    pictures = [str(confusion), str(mistakes)]
    return {"metrics": metrics, "intervals": intervals, "pictures": pictures}


def worst_mistakes(probabilities: Probabilities, labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """Positions of wrong predictions, the most certain first."""
    predicted = probabilities.argmax(1)
    wrong = np.flatnonzero(predicted != labels)
    certainty = probabilities[wrong, predicted[wrong]]
    return wrong[np.argsort(-certainty, kind="stable")]
