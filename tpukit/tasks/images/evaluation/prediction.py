"""`tpukit predict` for image classifiers: a submission."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from tpukit.errors import DataError
from tpukit.hardware.backend import Backend
from tpukit.io.files import write_file
from tpukit.tasks.images.data.listing import (
    LabelledImages,
    column_of,
    files_of,
    find_test_files,
    image_files_directly,
    table_rows,
)
from tpukit.tasks.images.evaluation.evaluate import Probabilities, class_probabilities
from tpukit.tasks.images.task import ImagesTask, Log
from tpukit.train.requests import PredictionRequest

DEFAULT_OUT = Path("submission.csv")
ROUNDING = 8


@dataclass(frozen=True)
class ToPredict:
    """Images with the ids of their rows, in the order of the submission."""

    ids: list[str]
    files: list[str]
    columns: tuple[str, str]
    """Names of the columns of id and class."""


def find_images(task: ImagesTask, request: PredictionRequest) -> ToPredict:
    """The images of a table, of a sample submission, or of a folder.

    Raises DataError naming what is missing.
    """
    table = request.sample_submission or request.test_csv or _test_table(task, request)
    id_name, label_name = task.config.id_column or "id", task.config.label_column or "label"
    if table is None:
        files = find_test_files(task.config, request.data_path)
        return ToPredict([Path(file).stem for file in files], files, (id_name, label_name))
    rows = table_rows(table)
    column = column_of(table, rows, task.config.id_column, 0, "id_column")
    names = list(rows[0])
    if request.sample_submission is not None and len(names) > 1:
        label_name = names[1]
    ids = [row[column] or "" for row in rows]
    return ToPredict(ids, files_of(ids, _folder(task, request), str(table)), (column, label_name))


def _test_table(task: ImagesTask, request: PredictionRequest) -> Path | None:
    table = Path(request.data_path or task.config.data_path) / "test.csv"
    return table if table.is_file() else None


def _folder(task: ImagesTask, request: PredictionRequest) -> Path:
    given = request.data_path
    if given is not None and given.is_dir() and image_files_directly(given):
        return given
    return Path(find_test_files(task.config, given)[0]).parent


def predict_classes(
    task: ImagesTask, model: nn.Module, backend: Backend, request: PredictionRequest, log: Log
) -> dict[str, Any]:
    """Writes the submission; the JSON fields of `tpukit predict`. Every rank must call it."""
    found = find_images(task, request)
    assert task.class_names is not None
    images = LabelledImages(tuple(found.files), (0,) * len(found.files), task.class_names)
    probabilities = class_probabilities(task, model, backend, images)
    out = request.out or DEFAULT_OUT
    if backend.is_main:
        write_submission(out, found, task, probabilities)
    log(f"{len(found.ids)} rows in {out}")
    return {"task": task.name, "rows": len(found.ids), "path": str(out)}


def write_submission(
    out: Path, found: ToPredict, task: ImagesTask, probabilities: Probabilities
) -> None:
    """A row an image: its id, and its class or each class's probability."""
    classes: Sequence[str] = task.class_names or ()
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    if task.config.probabilities:
        writer.writerow([found.columns[0], *classes])
        for name, row in zip(found.ids, probabilities, strict=True):
            writer.writerow([name, *(f"{value:.{ROUNDING}f}" for value in row)])
    else:
        writer.writerow(found.columns)
        for name, row in zip(found.ids, probabilities, strict=True):
            writer.writerow([name, classes[int(row.argmax())]])
    try:
        write_file(out, stream.getvalue().encode())
    except OSError as error:
        raise DataError(
            f"{out} cannot be written: {error.strerror}.", "Choose another --out."
        ) from error
