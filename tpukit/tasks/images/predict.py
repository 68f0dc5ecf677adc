"""`tpukit predict` for image classifiers: a submission."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import compress, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from tpukit.errors import ConfigError, DataError
from tpukit.hardware.backend import Backend
from tpukit.io.files import writing_errors
from tpukit.io.tables import Table, plain_name, table_file, write_csv
from tpukit.tasks.images.data import listing
from tpukit.tasks.images.data.files import check_headers, first_names
from tpukit.tasks.images.evaluate import Log, Probabilities, class_probabilities
from tpukit.tasks.images.training import ImageTraining
from tpukit.train.requests import PredictionRequest

DEFAULT_OUT = Path("submission.csv")
ROUNDING = 8
ROWS = ("frequencies", "uniform")
"""Kinds of rows for images that cannot be read."""


@dataclass(frozen=True)
class ToPredict:
    """Images with the ids of their rows, in the order of the submission."""

    ids: list[str]
    files: list[str]
    columns: tuple[str, ...]
    """Names of the columns: the id's, then the class's, or each class as one."""
    shown: Sequence[str] = ()
    """Classes whose probabilities the columns hold; none: the one column holds the class."""
    placeholder: str | None = None
    """A value of a sample's column of classes, where it holds none of them."""


def find_images(task: ImageTraining, request: PredictionRequest) -> ToPredict:
    """The images of a table, of a sample submission, or of a folder.

    Raises DataError naming what is missing.
    """
    beside = table_file(Path(request.data_path or task.config.data_path), "test")
    path = request.sample_submission or request.test_csv or (beside if beside.is_file() else None)
    shown = task.class_names or () if task.config.probabilities else ()
    others = shown or (task.config.label_column or "label",)
    folder = listing.find_test_folder(task.config, request.data_path)
    if path is None:
        files = listing.image_files(folder)
        if not files:
            raise DataError(f"there is no image in {folder}.", "Name another with --data-path.")
        columns = (task.config.id_column or "id", *others)
        return ToPredict(listing.ids_of(files, folder), files, columns, shown)
    table = listing.image_table(path)
    column, placeholder = listing.id_column_of(table, task.config, needed=1), None
    if request.sample_submission is not None:
        others = tuple(name for name in map(plain_name, table.columns) if name != column)
        _require_learned(table, others, task)
        values = {value for name in others for value in table.column(name)}
        shown = _shown(path, others, values, task)
        if not shown and not values & {*(task.class_names or ())}:
            placeholder = table.column(others[0])[0]
    files = listing.files_of(table, column, folder)
    return ToPredict(table.column(column), files, (column, *others), shown, placeholder)


def _require_learned(sample: Table, columns: Sequence[str], task: ImageTraining) -> None:
    """Raises DataError where a sample asks for a column that the training table had beside what
    was learned."""
    if task.table_columns is None:
        return
    learned, others = task.table_columns["learned"], task.table_columns["others"]
    for name in (name for name in columns if name in others and name not in learned):
        raise DataError(
            f"{sample.path} asks for {name}; the run has learned {', '.join(learned)}.",
            f"Train on that column: --set label_column={name}, or leave --sample-submission out.",
        )


def _is_fraction(text: str) -> bool:
    """Whether a cell holds a number that is not whole, as probabilities are."""
    try:
        return not float(text).is_integer()
    except ValueError:
        return False


def check_images(task: ImageTraining, request: PredictionRequest) -> None:
    """Raises what is known of the images to predict before a device is opened."""
    files = find_images(task, request).files
    neutral_row(task)
    for other in request.averaged:
        assert isinstance(other.task, ImageTraining)
        if other.task.class_names != task.class_names:
            raise ConfigError(
                f"{other.run.path} has other classes than {request.run.path}"
                f" ({_first_difference(other.task.class_names, task.class_names)}).",
                "Average runs of the same classes.",
            )
    if task.config.damaged == "stop":
        check_headers(files, values=task.values)


def _first_difference(these: Sequence[str] | None, those: Sequence[str] | None) -> str:
    pairs = zip_longest(these or (), those or ())
    return next(f"{one!r} instead of {other!r}" for one, other in pairs if one != other)


def _shown(
    table: Path, columns: tuple[str, ...], values: Collection[str], task: ImageTraining
) -> tuple[str, ...]:
    """Classes whose probabilities a sample asks for; none where its one column holds classes.

    Of two classes one column asks for one, by its name, values that are not whole or the settings.
    """
    classes = task.class_names or ()
    if sorted(columns) == sorted(classes):
        return columns
    if len(columns) == 1 and len(classes) == 2:
        if columns[0] in classes:
            return columns
        asked = task.config.probabilities or any(map(_is_fraction, values))
        return (classes[1],) if asked else ()
    if len(columns) == 1 and not task.config.probabilities:
        return ()
    raise DataError(
        f"{table}: beside the id it has the columns {', '.join(columns) or 'none'}, neither one of "
        f"classes nor one for each of the {len(classes)} classes ({', '.join(classes[:3])}, ...).",
        "Leave --sample-submission out: the ids are test.csv's, --set probabilities=true writes "
        "the probabilities.",
    )


def predict_classes(
    task: ImageTraining, model: nn.Module, backend: Backend, request: PredictionRequest, log: Log
) -> dict[str, Any]:
    """Writes the submission; the JSON fields of `tpukit predict`. Every rank must call it."""
    found = find_images(task, request)
    assert task.class_names is not None
    for warning in task.tta_warnings(request.run.path):
        log(warning)
    images = listing.LabelledImages(tuple(found.files), (0,) * len(found.files), task.class_names)
    probabilities, readable = class_probabilities(task, model, backend, images)
    for other in request.averaged:
        assert isinstance(other.task, ImageTraining)
        for warning in other.task.tta_warnings(other.run.path):
            log(warning)
        model = other.model_on(backend)
        further, also = class_probabilities(other.task, model, backend, images)
        probabilities, readable = probabilities + further, readable & also
    probabilities /= 1 + len(request.averaged)
    best = probabilities.argmax(1)
    probabilities[~readable], best[~readable] = neutral_row(task)
    out = request.out or DEFAULT_OUT
    if backend.is_main:
        write_submission(out, found, task, probabilities, best)
    mean = f", the mean of {1 + len(request.averaged)} runs" if request.averaged else ""
    log(f"{len(found.ids)} rows in {out}{mean}: {what_is_written(found, task)}")
    damaged = list(compress(found.ids, ~readable))
    if damaged:
        log(_about_damaged(damaged, len(found.ids), task))
    return {"task": task.name, "rows": len(found.ids), "path": str(out), "damaged": damaged}


def what_is_written(found: ToPredict, task: ImageTraining) -> str:
    """The values of a submission, in words."""
    name = found.columns[1]
    if len(found.shown) == 1:
        return f"{name} is the probability of class {found.shown[0]!r}"
    if found.placeholder is not None:
        first = ", ".join((task.class_names or ())[:3])
        return f"{name} is the class ({first}, ...); the sample has {found.placeholder!r}, no class"
    return "each class's probability" if found.shown else f"{name} is the class"


def neutral_row(task: ImageTraining) -> tuple[Probabilities, int]:
    """What stands for an image that cannot be read: (classes,) probabilities, and a class.

    Raises ConfigError where `damaged_row` is neither a kind of row nor a class.
    """
    wanted, classes = task.config.damaged_row, list(task.class_names or ())
    counts = np.array(task.class_counts or [1] * len(classes), np.float32)
    if wanted in ROWS:
        row = counts if wanted == "frequencies" else np.ones_like(counts)
        return row / row.sum(), int(counts.argmax())
    if wanted not in classes:
        raise ConfigError(
            f"damaged_row {wanted!r} is neither {' nor '.join(ROWS)} nor a class"
            f" ({', '.join(classes[:3])}, ...)."
        )
    return np.eye(len(classes), dtype=np.float32)[classes.index(wanted)], classes.index(wanted)


def _about_damaged(ids: Sequence[str], total: int, task: ImageTraining) -> str:
    wanted = task.config.damaged_row
    if wanted == "frequencies" and task.class_counts is None:
        wanted = "uniform, as this run keeps no frequencies"
    message = f"Warning: {len(ids)} of {total} images cannot be read and have a neutral row"
    return f"{message} (damaged_row: {wanted}): {first_names(ids)}"


def write_submission(
    out: Path,
    found: ToPredict,
    task: ImageTraining,
    probabilities: Probabilities,
    best: NDArray[np.int64],
) -> None:
    """A row an image: its id, and its class (`best`) or each class's probability."""
    classes = task.class_names or ()
    places = [classes.index(name) for name in found.shown]
    rows = [
        [name, *([f"{row[i]:.{ROUNDING}f}" for i in places] or [classes[label]])]
        for name, row, label in zip(found.ids, probabilities, best, strict=True)
    ]
    with writing_errors(out.parent):
        write_csv(out, [found.columns, *rows])
