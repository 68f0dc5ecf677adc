"""`tpukit predict` for images: raw predictions of a table's, a sample's or a folder's images."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torch import nn

from tpukit.errors import DataError
from tpukit.hardware.backend import Backend
from tpukit.io.tables import Table, column_place, plain_name, read_table, table_file
from tpukit.tasks.images.data import listing
from tpukit.tasks.images.data.files import check_headers
from tpukit.tasks.images.data.listing import LabelledImages
from tpukit.tasks.images.evaluate import Log, predictions_of
from tpukit.tasks.images.training import ImageTraining
from tpukit.train.features import TableFeatures
from tpukit.train.labelled import id_column_of, table_with_rows
from tpukit.train.requests import PredictionRequest
from tpukit.train.submission import Predictions, form_of, neutral_row, rows_by_id
from tpukit.train.target import Target


def find_images(task: ImageTraining, request: PredictionRequest) -> tuple[LabelledImages, str]:
    """The images of a sample submission, of a table, or of a folder, without labels, in the order
    of the submission; and the name of the column of their ids.

    Raises DataError naming what is missing.
    """

    def images(
        files: Sequence[str], ids: Sequence[str], texts: Sequence[Mapping[str, str]] = ()
    ) -> LabelledImages:
        blank = learned(task).blank().tolist()
        return LabelledImages(
            tuple(files), (blank,) * len(files), learned(task), tuple(ids), tuple(texts)
        )

    beside = table_file(Path(request.data_path or task.settings.data_path), "test")
    path = request.sample_submission or request.test_csv or (beside if beside.is_file() else None)
    folder = listing.find_test_folder(task.settings, request.data_path)
    if path is None and task.beside is None:
        files = listing.image_files(folder)
        if not files:
            raise DataError(f"there is no image in {folder}.", "Name another with --data-path.")
        return images(files, listing.ids_of(files, folder)), task.settings.id_column or "id"
    table, named = table_with_rows(path or beside), task.settings.id_column
    tests = request.test_csv or beside
    # A sample may have other ids than the images' names: the test table has both.
    is_apart = named and column_place(table.columns, named) is None and tests.is_file()
    of_images = named if is_apart else None
    column = id_column_of(table, None if of_images else named, needed=1)
    source = table if path == tests or not (of_images or task.beside) else table_with_rows(tests)
    ids = table.column(column)
    if of_images:
        found = listing.files_of(source, of_images, folder)
        files = [found[row] for row in _places(source, column, ids, f"{of_images} names its image")]
    else:
        files = listing.files_of(table, column, folder)
    if task.beside is None:
        return images(files, ids), column
    return images(files, ids, _texts_by_id(source, task.beside, column, ids)), column


def _texts_by_id(
    table: Table, features: TableFeatures, id_column: str, ids: Sequence[str]
) -> list[Mapping[str, str]]:
    """The features of each id. Raises DataError for an id that the table lacks."""
    texts, seen = [*listing.texts_of(table, features.columns)], ", ".join(features.columns[:3])
    return [texts[row] for row in _places(table, id_column, ids, f"{seen} the model sees")]


def _places(table: Table, id_column: str, ids: Sequence[str], why: str) -> Iterator[int]:
    """The row of each id, rows with one id in their order. Raises DataError for an id that the
    table lacks; why: the end of `whose ...`."""
    places = rows_by_id(table.column(id_column))
    for name in ids:
        if not (rows := places[plain_name(name)]):
            raise DataError(
                f"{table.path} has no row of {id_column} {name!r}, whose {why}.",
                "Name the table with --test-csv FILE.",
            )
        yield rows.popleft() if len(rows) > 1 else rows[0]


def learned(task: ImageTraining) -> Target:
    """What a run's task has learned."""
    assert task.predicts is not None, "a run has learned something"
    return task.predicts


def check_images(task: ImageTraining, request: PredictionRequest) -> None:
    """Raises what is known of the images to predict before a device is opened."""
    found, id_column = find_images(task, request)
    task.require_seen_views(request.run.path)
    neutral_row(learned(task), task.settings.damaged_row)
    sample = request.sample_submission and read_table(request.sample_submission)
    form_of(learned(task), sample or None, id_column, probabilities=task.settings.probabilities)
    if task.beside is not None:
        task.beside.require(found.texts)
    if task.settings.damaged == "stop":
        check_headers(found.files, values=task.values)


def predicted_images(
    task: ImageTraining, model: nn.Module, backend: Backend, request: PredictionRequest, log: Log
) -> Predictions:
    """The predictions of the images. Every rank must call it."""
    images, id_column = find_images(task, request)
    return Predictions(
        images.ids, predictions_of(task, model, backend, images), images.target, id_column,
        task.settings.damaged_row, task.settings.probabilities,
        [*task.beside.unseen(images.texts)] if task.beside else [],
    )  # fmt: skip
