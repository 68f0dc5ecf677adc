"""Which images there are, and of which classes.

Layouts, tried in this order:
    train.csv                a table of ids and labels beside a folder of images, with valid.csv
                             or val.csv, where there is one
    train/CLASS/*            with valid/CLASS/* or val/CLASS/*, where there is one
    CLASS/*                  folders of classes alone
Where no part is for validation, a fraction of each class is.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tpukit.errors import DataError
from tpukit.io.tables import Table, plain_name, read_table, spelled, table_file
from tpukit.tasks.images.settings import ImagesConfig
from tpukit.train.labelled import (
    LabelledTable,
    features_of,
    labelled,
    remarks_on_parts,
    split_rows,
    training_table,
    validation_rows_of,
)
from tpukit.train.pseudo import pseudo_labels, soft
from tpukit.train.target import Target, Values, as_number, numbers_first, require_known

SUFFIXES = (
    ".jpg", ".jpeg", ".jfif", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".avif", ".jp2",
    ".ppm", ".pgm",
)  # fmt: skip
TRAINING_FOLDERS = ("train", "training")
VALIDATION_FOLDERS = ("valid", "val", "validation")
IMAGE_FOLDERS = ("train_images", "images", "train")
TEST_FOLDERS = ("test_images", "test", "images")
PARTS = ("train", "test", "val", "pred")
"""What the names of parts contain."""
MOST_SINGLE = 10
"""Classes of numbers that need no remark."""


@dataclass(frozen=True)
class LabelledImages:
    """Image files with what is predicted of them."""

    files: tuple[str, ...]
    labels: tuple[Any, ...]
    """Positions of classes, scores, or a tuple of labels or numbers each."""
    target: Target
    ids: tuple[str, ...] = ()
    """As the table spells them; none: there is no table."""
    texts: tuple[Mapping[str, str], ...] = ()
    """Features of each image by column; none: there are none."""

    def __len__(self) -> int:
        return len(self.files)

    @property
    def names(self) -> Sequence[str]:
        """The ids, or the files' names."""
        return self.ids or [Path(file).name for file in self.files]

    @property
    def classes(self) -> tuple[str, ...]:
        return self.target.classes

    @property
    def values(self) -> Values:
        """See `Target.values`; with soft labels `PseudoLabels.values`."""
        is_class = self.target.kind == "class" and not isinstance(next(iter(self.labels), 0), tuple)
        return np.array(self.labels, np.int64 if is_class else np.float32)

    def class_counts(self) -> tuple[int, ...]:
        """Images of each class."""
        return tuple(np.bincount(np.array(self.labels, int), minlength=len(self.classes)).tolist())

    def digest(self) -> str:
        """Changes when a file is added, removed or labelled otherwise."""
        digest = hashlib.sha256(os.fsencode("\n".join(self.target.predicted)))
        for file, label in zip(self.files, self.labels, strict=True):
            digest.update(os.fsencode(f"{Path(file).name} {label}\n"))
        for text in self.texts:
            digest.update(repr(text).encode())
        return digest.hexdigest()[:16]

    def part(self, places: Iterable[int]) -> LabelledImages:
        """The images at these positions."""
        chosen = sorted(places)
        files, labels = (tuple(each[i] for i in chosen) for each in (self.files, self.labels))
        ids = tuple(self.ids[i] for i in chosen if self.ids)
        texts = tuple(self.texts[i] for i in chosen if self.texts)
        return LabelledImages(files, labels, self.target, ids, texts)

    def split(self, places: set[int]) -> tuple[LabelledImages, LabelledImages]:
        """The images at other positions, and those at these with all their copies."""
        chosen = {self.files[place] for place in places}
        copies = {place for place, file in enumerate(self.files) if file in chosen}
        return self.part({*range(len(self))} - copies), self.part(copies)


def find_training_images(
    config: ImagesConfig, known: Target | None = None
) -> tuple[LabelledImages, LabelledImages]:
    """The training and the validation images.

    known: what the run that goes on has learned; None: what the data decides.

    Raises DataError naming what is missing.
    """
    root = Path(config.data_path)
    if not root.is_dir():
        raise DataError(
            f"there is no folder {root}.",
            "Give the images' folder with --data-path, or generate some: tpukit data images",
        )
    table = training_table(config)
    if table is not None:
        folder = named_folder(config) or _existing(root, IMAGE_FOLDERS) or table.path.parent
        rows = labelled(table, config, known, config.features)
        if config.id_column is None:
            _require_own_images(rows, folder)
        features = features_of(rows, config, config.features)
        train = labelled_images(rows, folder, features)
        tables = (table_file(table.path.parent, name) for name in VALIDATION_FOLDERS)
        beside = next((path for path in tables if path.is_file()), None)
        if beside is None or config.fold is not None or config.group_column is not None:
            return train.split(validation_rows_of(rows, config, train.files))
        folder = named_folder(config) or _existing(root, VALIDATION_FOLDERS) or folder
        others = labelled(read_table(beside), config, rows.target)
        return train, labelled_images(others, folder, features)
    inner = _existing(root, TRAINING_FOLDERS)
    train = read_class_folders(inner or root, known, beside=() if inner else TEST_FOLDERS[:2])
    valid = _existing(root, VALIDATION_FOLDERS) if inner else None
    if valid is not None:
        return train, read_class_folders(valid, train.target)
    chosen = split_rows(
        train.labels, fold=config.fold, folds=config.folds, fraction=config.valid_fraction
    )
    return train.split(chosen)


def _require_own_images(rows: LabelledTable, folder: Path) -> None:
    """Raises DataError where rows share images by their ids, and another column names an image for
    each: numbers such as a width or a class may name images too."""
    table, apart = rows.table, ("", rows.id_column, *rows.target.of_table)
    if len({*rows.ids}) == len(rows.ids):
        return
    for name in (name for name in map(plain_name, table.columns) if name not in apart):
        if len({*table.column(name)}) < len(table.rows):
            continue
        with suppress(DataError):
            files_of(table, name, folder)
            break
    else:
        return
    raise DataError(
        f"{table.path}: by {rows.id_column} several rows have one image, by {name} each its own.",
        f"Name the column of the images: --set id_column={name}, or {rows.id_column}.",
    )


def labelled_images(
    rows: LabelledTable, folder: Path, features: Sequence[str] = ()
) -> LabelledImages:
    """The images of a table's rows, given the folder of the files and the columns beside them.

    Raises DataError naming the row of a missing file, or of an image with another label above.
    """
    table, target = rows.table, rows.target
    files = files_of(table, rows.id_column, folder)
    labels: tuple[Any, ...] = tuple(
        tuple(v) if isinstance(v, list) else v for v in rows.values.tolist()
    )
    label_of: dict[str, int] = {}
    for row, (file, label) in enumerate(zip(files, labels, strict=True)):
        before = label_of.setdefault(file, row)
        if str(labels[before]) != str(label):  # NaN is as NaN
            both = label, labels[before]
            shown = [target.classes[v] for v in both] if target.kind == "class" else both
            raise DataError(
                f"{table.where(row)}: {file} is {shown[0]!r}, above it is {shown[1]!r}.",
                "The rows of an image have one label; several labels are columns of 0 and 1.",
            )
    texts = tuple(texts_of(table, features)) if features else ()
    return LabelledImages(tuple(files), labels, target, tuple(rows.ids), texts)


def with_predicted(train: LabelledImages, config: ImagesConfig) -> LabelledImages:
    """Training images with those of the setting `pseudo` behind them, all with soft labels."""
    found = pseudo_labels(config, train.target)
    if found is None:
        return train
    files = files_of(found.table, found.id_column, find_test_folder(config, None))
    texts: tuple[Mapping[str, str], ...] = ()
    if train.texts:
        texts = (*train.texts, *texts_of(found.test_rows(config), [*train.texts[0]]))
    values = [*soft(train.target, train.values).tolist(), *found.values.tolist()]
    labels = tuple(tuple(v) if isinstance(v, list) else v for v in values)
    ids = (*train.names, *found.table.column(found.id_column))
    return LabelledImages((*train.files, *files), labels, train.target, ids, texts)


def texts_of(table: Table, columns: Sequence[str]) -> Iterator[Mapping[str, str]]:
    """Each row's texts in these columns. Raises DataError for a column that is not there."""
    found = [table.column(name) for name in columns]
    for row in zip(*found, strict=True):
        yield dict(zip(columns, row, strict=True))


def remarks(config: ImagesConfig, train: LabelledImages) -> Iterator[str]:
    """What the layout leaves open: the columns that are learned, one of folds that is not used,
    folders in all classes, classes without training images."""
    target, table = train.target, training_table(config)
    if target.kind == "class":
        counts = zip(train.classes, train.class_counts(), strict=True)
        if missing := [name for name, n in counts if not n]:
            yield f"No training image is of class {', '.join(missing[:3])}: it will not be learned."
    if table is None:
        folders: dict[int, set[str]] = {}
        for file, label in zip(train.files, train.labels, strict=True):
            folders.setdefault(label, set()).add(Path(file).parent.name)
        common = sorted(set.intersection(*folders.values()))
        if len(common) > 1:
            yield f"Each class has folders {', '.join(common[:3])}: images of all are taken."
        return
    if config.columns is None or config.target is None:
        yield target.remark()
    are_numbers = len(target.columns) == 1 and None not in map(as_number, train.classes)
    if target.kind == "class" and are_numbers and len(train.classes) > MOST_SINGLE:
        name = target.columns[0]
        yield f"The values of {name} are numbers: each is learned as a class of its own."
    yield from remarks_on_parts(table, target, config)


def _existing(root: Path, names: Iterable[str]) -> Path | None:
    """The folder of the first name that is there, in capitals or not."""
    entries = os.scandir(root) if root.is_dir() else ()
    there = {name.lower(): name for name in sorted(e.name for e in entries if e.is_dir())}
    return next((root / there[name] for name in names if name in there), None)


def read_class_folders(
    folder: Path, target: Target | None = None, *, beside: Collection[str] = ()
) -> LabelledImages:
    """`folder/CLASS/*` (and folders in them), in the order of classes.

    beside: names of folders that hold no class.

    Raises DataError for a folder without classes, an empty class, or one that is not the target's.
    """
    folders = {e.name for e in os.scandir(folder) if e.is_dir() and not _is_hidden(e.name)}
    found = numbers_first(name for name in folders if name.lower() not in beside)
    if not found:
        names = sorted(path.name for path in [*folder.glob("*.csv"), *folder.parent.glob("*.csv")])
        table = next(
            (n for n in names if "train" in n.lower() or "label" in n.lower()), "train.csv"
        )
        raise DataError(
            f"{folder} has no folders of classes.",
            f"Put the images into {folder}/CLASS/, or name a table: --set table={table}",
        )
    if target is None:
        _require_several(found, folder)
    known = target or Target("class", ("label",), tuple(found), "folders")
    require_known(found, known.classes, str(folder))
    files: list[str] = []
    labels: list[int] = []
    for name in sorted(found, key=known.classes.index):
        own = image_files(folder / name)
        if not own:
            raise DataError(
                f"class {name!r} is empty: there is no image in {folder / name}.",
                f"Add images ({', '.join(SUFFIXES[:3])}, ...) or remove the folder.",
            )
        files += own
        labels += [known.classes.index(name)] * len(own)
    return LabelledImages(tuple(files), tuple(labels), known)


def _require_several(found: Sequence[str], folder: Path) -> None:
    """Raises DataError for one class, and for parts of a set (training_set, test_set)."""
    last = folder / max(found, key=lambda name: "train" in name.lower())
    inner = sorted(e.name for e in os.scandir(last) if e.is_dir() and not _is_hidden(e.name))
    parts = all(any(part in name.lower() for part in PARTS) for name in found)
    if len(found) == 1 or (inner and parts):
        raise DataError(
            f"{folder}: its folders are {', '.join(found)} alone: no classes to tell apart.",
            f"Give the folder of {', '.join(inner[:3])}: --data-path {last}" if inner
            else f"Expected {folder}/CLASS/ for two classes or more.",
        )  # fmt: skip


def image_files(folder: Path) -> list[str]:
    """Every image file below a folder, but for hidden ones, in the order of names."""
    found = []
    for place, inner, names in os.walk(folder, followlinks=True):
        inner[:] = [name for name in inner if not _is_hidden(name)]
        found += [
            os.path.join(place, name)  # noqa: PTH118 - a million paths
            for name in names
            if name.lower().endswith(SUFFIXES) and not name.startswith(".")
        ]
    return sorted(found)


def _is_hidden(folder: str) -> bool:
    """Whether an editor (.ipynb_checkpoints) or an archiver has left a folder beside the data."""
    return folder.startswith(".") or folder == "__MACOSX"


# -- tables --------------------------------------------------------------------------------------
def named_folder(config: ImagesConfig) -> Path | None:
    """The folder that the settings name. Raises DataError where it is not there."""
    if config.folder is None:
        return None
    folder = Path(config.data_path) / config.folder
    if not folder.is_dir():
        raise DataError(f"folder {config.folder!r}: there is no folder {folder}.")
    return folder


def files_of(table: Table, column: str, folder: Path) -> list[str]:
    """The file of each id in a column: it may lack suffix and folder, or be a path from above.

    Raises DataError for ids without a file, or with several.
    """
    files = image_files(folder)
    paths = [os.path.relpath(file, folder) for file in files]
    names = [os.path.basename(file) for file in files]  # noqa: PTH119 - a million paths
    by_name: dict[str, list[str]] = {}
    for spellings in (paths, _stems(paths), names, _stems(names)):
        own: dict[str, list[str]] = {}
        for name, file in zip(spellings, files, strict=True):
            own.setdefault(name, []).append(file)
        by_name = own | by_name  # a path is itself, whatever else has its name
    given = table.column(column)
    ids = [name if name in by_name else _below(name, folder) for name in given]
    if others := {*ids} - {*by_name}:
        # In other letters (1.JPG), of another Unicode form, as file systems write them, or with
        # blanks around.
        plain: dict[str, set[str]] = {}
        for name, found in by_name.items():
            plain.setdefault(plain_name(name).lower(), set()).update(found)
        by_name |= {name: sorted(plain.get(plain_name(name).lower(), ())) for name in others}
    for row, name in enumerate(ids):
        if len(by_name[name]) > 1:
            raise DataError(
                f"{table.where(row)}: {name!r} is {by_name[name][0]} or {by_name[name][1]}.",
                "Name the folder of the images with --set folder=NAME, or write ids with folder"
                " and suffix.",
            )
    missing = [(row, given[row]) for row, name in enumerate(ids) if not by_name[name]]
    if missing:
        row, name = missing[0]
        more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise DataError(
            f"{table.where(row)}: there is no image {spelled(name)} in {folder}{more}.",
            "Name the folder of the images with --set folder=NAME (of predict: --data-path), or the"
            " column of the ids with --set id_column=NAME.",
        )
    return [by_name[name][0] for name in ids]


def _below(name: str, folder: Path) -> str:
    """An id that is a path from a folder above (train/1.jpg, ../input/train/1.jpg), from here."""
    path = posixpath.normpath(name.replace("\\", "/"))
    while path.startswith("../"):
        path = path[3:]
    parts = folder.absolute().parts
    above = ("/".join(parts[place:]).replace("//", "/") + "/" for place in range(len(parts)))
    return next((path[len(start) :] for start in above if path.startswith(start)), path)


def _stems(paths: Iterable[str]) -> list[str]:
    return [os.path.splitext(path)[0] for path in paths]  # noqa: PTH122 - a million paths


# -- images to predict ---------------------------------------------------------------------------
def find_test_folder(config: ImagesConfig, given: Path | None) -> Path:
    """The folder of the images to predict: the one given, or the data path's test folder."""
    folder = given or _existing(Path(config.data_path), TEST_FOLDERS)
    if folder is None or not folder.is_dir():
        raise DataError(
            f"there is no folder {given or Path(config.data_path) / 'test'} of images to predict.",
            "Give it with --data-path DIR.",
        )
    if any(entry.name.lower().endswith(SUFFIXES) for entry in os.scandir(folder)):
        return folder
    return _existing(folder, TEST_FOLDERS) or folder


def ids_of(files: Sequence[str], folder: Path) -> list[str]:
    """The ids of files without a table: names without suffix, else paths in the folder."""
    names = [Path(file).stem for file in files]
    if len(set(names)) == len(names):
        return names
    return [os.path.relpath(file, folder) for file in files]
