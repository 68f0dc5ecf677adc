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
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tpukit.errors import DataError
from tpukit.io.tables import Table, column_place, plain_name, read_table, spelled, table_file
from tpukit.tasks.images.settings import ImagesConfig
from tpukit.train.target import (
    FOLD_NAMES,
    LABEL_NAMES,
    ZERO_OR_ONE,
    LearnedColumns,
    as_number,
    columns_of_tests,
    learned_columns,
    sample_beside,
)

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
"""Classes that may have an image each; numbers and texts have more."""
NUMBER = re.compile(r"[+-]?\d*\.?\d+(e[+-]?\d+)?", re.IGNORECASE)
SPLIT_SEED = 0


@dataclass(frozen=True)
class LabelledImages:
    """Image files with their classes."""

    files: tuple[str, ...]
    labels: tuple[int, ...]
    """Positions in `classes`."""
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.files)

    def class_counts(self) -> tuple[int, ...]:
        """Images of each class."""
        return tuple(np.bincount(np.array(self.labels, int), minlength=len(self.classes)).tolist())

    def digest(self) -> str:
        """Changes when a file is added, removed or labelled otherwise."""
        digest = hashlib.sha256(os.fsencode("\n".join(self.classes)))
        for file, label in zip(self.files, self.labels, strict=True):
            digest.update(os.fsencode(f"{Path(file).name} {label}\n"))
        return digest.hexdigest()[:16]

    def part(self, places: Iterable[int]) -> LabelledImages:
        """The images at these positions."""
        chosen = sorted(places)
        files = tuple(self.files[i] for i in chosen)
        return LabelledImages(files, tuple(self.labels[i] for i in chosen), self.classes)

    def split(self, places: set[int]) -> tuple[LabelledImages, LabelledImages]:
        """The images at other positions, and those at these with all their copies."""
        chosen = {self.files[place] for place in places}
        copies = {place for place, file in enumerate(self.files) if file in chosen}
        return self.part({*range(len(self))} - copies), self.part(copies)


def find_training_images(
    config: ImagesConfig, classes: Sequence[str] | None = None
) -> tuple[LabelledImages, LabelledImages]:
    """The training and the validation images.

    classes: those of the run that goes on; None: those of the data.

    Raises DataError naming what is missing.
    """
    root = Path(config.data_path)
    if not root.is_dir():
        raise DataError(
            f"there is no folder {root}.",
            "Give the images' folder with --data-path, or generate some: tpukit data images",
        )
    table = _table(config)
    if table is not None:
        folder = named_folder(config) or _existing(root, IMAGE_FOLDERS) or table.path.parent
        target = target_of(table, config, classes)
        train = labelled(table, config, folder, classes, target)
        tables = (table_file(table.path.parent, name) for name in VALIDATION_FOLDERS)
        beside = next((path for path in tables if path.is_file()), None)
        if beside is None or config.fold is not None or config.group_column is not None:
            return train.split(_validation_rows(table, train, config))
        folder = named_folder(config) or _existing(root, VALIDATION_FOLDERS) or folder
        return train, labelled(read_table(beside), config, folder, train.classes, target)
    inner = _existing(root, TRAINING_FOLDERS)
    train = read_class_folders(inner or root, classes, beside=() if inner else TEST_FOLDERS[:2])
    valid = _existing(root, VALIDATION_FOLDERS) if inner else None
    if valid is not None:
        return train, read_class_folders(valid, train.classes)
    return train.split(stratified(train.labels, config.valid_fraction))


def _validation_rows(table: Table, images: LabelledImages, config: ImagesConfig) -> set[int]:
    """The rows to validate on: a fold, or a fraction of each class, by whole groups if asked."""
    if config.fold is not None:
        column = config.fold_column or "fold"
        return of_fold(table.path, column, column_of(table, "fold_column", column), config.fold)
    groups: Sequence[str] = images.files
    if config.group_column is not None:
        groups = column_of(table, "group_column", config.group_column)
    elif len({*groups}) == len(groups):
        return stratified(images.labels, config.valid_fraction)
    return stratified_groups(images.labels, groups, config.valid_fraction)


def remarks(config: ImagesConfig, train: LabelledImages) -> Iterator[str]:
    """What the layout leaves open: the column of the classes that was chosen among several, one of
    folds that is not used, folders in all classes, classes without training images."""
    missing = [name for name, n in zip(train.classes, train.class_counts(), strict=True) if not n]
    if missing:
        yield f"No training image is of class {', '.join(missing[:3])}: it will not be learned."
    table = _table(config)
    if table is None:
        folders: dict[int, set[str]] = {}
        for file, label in zip(train.files, train.labels, strict=True):
            folders.setdefault(label, set()).add(Path(file).parent.name)
        common = sorted(set.intersection(*folders.values()))
        if len(common) > 1:
            yield f"Each class has folders {', '.join(common[:3])}: images of all are taken."
        return
    target = target_of(table, config, train.classes)
    labels = target.columns
    if config.label_column is None:
        yield (
            f"{len(train.classes)} classes by the column{'s' if len(labels) > 1 else ''}"
            f" {', '.join(labels)} ({target.why}); another: --set label_column=NAME"
        )
    are_numbers = len(labels) == 1 and None not in map(as_number, train.classes)
    if are_numbers and len(train.classes) > MOST_SINGLE:
        yield f"The values of {labels[0]} are numbers: each is learned as a class of its own."
    names = map(plain_name, table.columns)
    folds = [name for name in names if name.lower() in FOLD_NAMES and name not in labels]
    if folds and config.fold is None and config.group_column is None:
        yield (
            f"The table's column {folds[0]} is not used; to validate on one of its folds:"
            f" --set fold_column={folds[0]} --set fold=0"
        )


def _table(config: ImagesConfig) -> Table | None:
    """The table of ids and labels. Raises DataError where a setting needs one that is not there."""
    root = Path(config.data_path)
    table = root / config.table if config.table else table_file(root, "train")
    for name in ("table", "fold", "fold_column", "group_column"):
        if getattr(config, name) is not None and not table.is_file():
            raise DataError(
                f"{name} {getattr(config, name)!r}: there is no table {table}.",
                "Name one of ids and labels in the data path: --set table=train.csv",
            )
    return image_table(table) if table.is_file() else None


def _existing(root: Path, names: Iterable[str]) -> Path | None:
    """The folder of the first name that is there, in capitals or not."""
    entries = os.scandir(root) if root.is_dir() else ()
    there = {name.lower(): name for name in sorted(e.name for e in entries if e.is_dir())}
    return next((root / there[name] for name in names if name in there), None)


def read_class_folders(
    folder: Path, classes: Sequence[str] | None = None, *, beside: Collection[str] = ()
) -> LabelledImages:
    """`folder/CLASS/*` (and folders in them), in the order of classes.

    beside: names of folders that hold no class.

    Raises DataError for a folder without classes, an empty class, or one that is not in `classes`.
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
    known = tuple(found if classes is None else classes)
    _require_known(found, known, str(folder))
    files: list[str] = []
    labels: list[int] = []
    for name in sorted(found, key=known.index):
        own = image_files(folder / name)
        if not own:
            raise DataError(
                f"class {name!r} is empty: there is no image in {folder / name}.",
                f"Add images ({', '.join(SUFFIXES[:3])}, ...) or remove the folder.",
            )
        files += own
        labels += [known.index(name)] * len(own)
    if classes is None:
        _require_several(found, folder)
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


def _require_known(found: Iterable[str], known: Sequence[str], place: str) -> None:
    new = sorted(set(found) - set(known))
    if new:
        raise DataError(
            f"{place}: class {new[0]!r} is not one of the model's {len(known)}"
            f" ({', '.join(known[:3])}, ...).",
            "Use the classes that the run was trained on, or train a new run (--results-dir).",
        )


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
def image_table(path: Path) -> Table:
    """A table with rows. Raises DataError where it has none."""
    table = read_table(path)
    if not table.rows:
        raise DataError(f"{path} has no rows.", "Expected a header and a row for each image.")
    return table


def target_of(
    table: Table, config: ImagesConfig, classes: Sequence[str] | None = None
) -> LearnedColumns:
    """The columns of the classes. Raises DataError where there are none, or numbers to predict."""
    if config.label_column is not None:
        column_of(table, "label_column", config.label_column)
    root = Path(config.data_path)
    target = learned_columns(
        table, id_column_of(table, config), named=config.label_column,
        apart=(config.fold_column, config.group_column), classes=classes,
        sample=sample_beside(root, config.sample_submission), tests=columns_of_tests(root),
    )  # fmt: skip
    if target.kind == "number":
        name = target.columns[0]
        values = list(dict.fromkeys(table.column(name)))
        raise DataError(
            f"{table.path}: {len(values)} values of {name} ({', '.join(values[:3])}, ...;"
            f" {target.why}) for {len(table.rows)} images are numbers, no classes.",
            "To predict a number, write a task of your own; name another column, of classes, with"
            " --set label_column=NAME.",
        )
    return target


def table_columns(config: ImagesConfig, classes: Sequence[str]) -> dict[str, list[str]] | None:
    """The columns that are learned from the table, and the others; None without one."""
    table = _table(config)
    if table is None:
        return None
    learned = target_of(table, config, classes).columns
    others = [name for name in map(plain_name, table.columns) if name not in learned]
    return {"learned": [*learned], "others": others}


def labelled(
    table: Table,
    config: ImagesConfig,
    folder: Path,
    classes: Sequence[str] | None,
    target: LearnedColumns | None = None,
) -> LabelledImages:
    """The images of a table of ids and labels, given the folder of the files.

    target: the columns of the classes, where another table decided them.

    Raises DataError naming the row of a missing file, or of an image with another label above.
    """
    names = (target or target_of(table, config, classes)).columns
    label_column = ", ".join(names)
    if len(names) > 1:
        columns, labels = names, _one_hot(table, names)
    else:
        labels = [label.strip() for label in table.column(label_column)]
        columns = tuple(labels)
    if not all(labels):
        raise DataError(
            f"{table.where(labels.index(''))}: there is no {label_column}.",
            "Fill it in, or remove the row.",
        )
    known = tuple(numbers_first({*columns}) if classes is None else classes)
    _require_known(labels, known, f"{table.path}, column {label_column!r}")
    position = {name: place for place, name in enumerate(known)}
    files = files_of(table, id_column_of(table, config), folder)
    hint = "Name the column of the classes with --set label_column=NAME."
    if classes is None and len(known) == 1:
        raise DataError(f"{table.path}: every {label_column} is {known[0]!r}.", hint)
    if classes is None and len(known) > max(MOST_SINGLE, len({*files}) / 2):
        raise DataError(
            f"{table.path}: {len(known)} values of {label_column} for {len({*files})} images are no"
            " classes.",
            f"{hint} To predict a number, write a task of your own.",
        )
    label_of: dict[str, str] = {}
    for row, (file, label) in enumerate(zip(files, labels, strict=True)):
        if label_of.setdefault(file, label) != label:
            raise DataError(
                f"{table.where(row)}: {file} is {label!r}, above it is {label_of[file]!r}.",
                "An image has one class here; for several write a task of your own.",
            )
    return LabelledImages(tuple(files), tuple(position[label] for label in labels), known)


def numbers_first(names: Iterable[str]) -> list[str]:
    """Classes: numbers (not "nan", which has no order) by their size, then the other names."""
    return sorted(names, key=lambda n: (0, float(n), n) if NUMBER.fullmatch(n) else (1, 0.0, n))


def id_column_of(table: Table, config: ImagesConfig, needed: int = 2) -> str:
    """The column of the ids: the one that is named, else the first that does not look like labels.

    needed: columns that a table must have; where there are more, pandas' index is none of them.
    """
    if config.id_column is not None:
        column_of(table, "id_column", config.id_column)
        return plain_name(config.id_column)
    names = [plain_name(name) for name in table.columns]
    named = [name for name in names if name and not name.startswith("Unnamed: ")]
    named = named if len(named) >= needed else names
    return next((name for name in named if name.lower() not in LABEL_NAMES), named[0])


def _one_hot(table: Table, columns: Sequence[str]) -> list[str]:
    """The column of each row that is 1. Raises DataError where none or several are."""
    labels = []
    for number, row in enumerate(zip(*map(table.column, columns), strict=True)):
        chosen = [n for n, v in zip(columns, row, strict=True) if ZERO_OR_ONE.get(v.strip())]
        if len(chosen) != 1:
            raise DataError(
                f"{table.where(number)}: {len(chosen)} of the columns {', '.join(columns[:3])}, ..."
                " are 1: an image has one class here.",
                "Name a column with --set label_column=NAME; for several labels write a task of"
                " your own.",
            )
        labels += chosen
    return labels


def column_of(table: Table, setting: str, name: str) -> list[str]:
    """The values of the column that a setting names. Raises DataError where there is none."""
    if column_place(table.columns, name) is None:
        raise DataError(
            f"{table.path}: {setting} {name}: there is no such column.",
            f"Its columns are {', '.join(table.columns)}: --set {setting}=NAME",
        )
    return table.column(name)


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
    by_name: dict[str, str] = {}
    second: dict[str, str] = {}
    for spellings in (paths, _stems(paths), names, _stems(names)):
        own: dict[str, str] = {}
        for name, file in zip(spellings, files, strict=True):
            if name not in by_name and own.setdefault(name, file) is not file:
                second[name] = file
        by_name |= own
    ids = [name if name in by_name else _below(name, folder) for name in table.column(column)]
    if any(name not in by_name for name in ids):
        # Of another Unicode form, as file systems write them, or with blanks around.
        plain: dict[str, str] = {}
        for name, file in by_name.items():
            key = plain_name(name)
            if key not in by_name and plain.setdefault(key, file) is not file:
                second[key] = file
        by_name |= plain
        ids = [name if name in by_name else plain_name(name) for name in ids]
    for row, name in enumerate(ids):
        if name in second:
            raise DataError(
                f"{table.where(row)}: {name!r} is {by_name[name]} or {second[name]}.",
                "Name the folder of the images with --set folder=NAME, or write ids with folder"
                " and suffix.",
            )
    missing = [(row, name) for row, name in enumerate(ids) if name not in by_name]
    if missing:
        row, name = missing[0]
        more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise DataError(
            f"{table.where(row)}: there is no image {spelled(name)} in {folder}{more}.",
            "Name the folder of the images with --set folder=NAME (of predict: --data-path), or the"
            " column of the ids with --set id_column=NAME.",
        )
    return [by_name[name] for name in ids]


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


# -- the part for validation -----------------------------------------------------------------------
def of_fold(table: Path, column: str, values: Sequence[str], fold: str) -> set[int]:
    """The rows whose value in a table's column is `fold`.

    Raises DataError where none has it, or every row.
    """
    chosen = {place for place, value in enumerate(values) if value == fold}
    if len(chosen) in (0, len(values)):
        there = ", ".join(sorted({*values})[:10])
        many = "every" if chosen else "no"
        raise DataError(
            f"{table}: {many} row has {fold!r} in the column {column!r}.",
            f"Its values are {there}: --set fold=VALUE names those to validate on.",
        )
    return chosen


def stratified(labels: Sequence[int], fraction: float) -> set[int]:
    """A fraction of each class, at least one of those with several images."""
    array = np.array(labels)
    chosen: set[int] = set()
    for label in np.unique(array).tolist():
        places = np.flatnonzero(array == label)
        order = np.random.default_rng([SPLIT_SEED, label]).permutation(places)
        count = min(round(fraction * len(places)) or int(fraction > 0), len(places) - 1)
        chosen.update(order[:count].tolist())
    return chosen


def stratified_groups(labels: Sequence[int], groups: Sequence[str], fraction: float) -> set[int]:
    """Whole groups that make up about a fraction of each class.

    In a drawn order each group is taken that brings the counts of the classes closer to the
    fraction (squared distance); where none does, the one that leaves them closest.
    """
    names, of_image = np.unique(np.array(groups), return_inverse=True)
    array = np.array(labels)
    order = np.random.default_rng(SPLIT_SEED).permutation(len(names))
    by_group = np.split(np.argsort(of_image, kind="stable"), np.cumsum(np.bincount(of_image))[:-1])
    missing = fraction * np.bincount(array).astype(float)
    start, taken = missing.copy(), []
    for group in order.tolist():
        counts = np.bincount(array[by_group[group]], minlength=len(missing))
        if _grown(counts, missing) < 0:
            missing -= counts
            taken.append(group)
    if not taken and fraction > 0 and len(names) > 1:
        alone = [_grown(np.bincount(array[g], minlength=len(start)), start) for g in by_group]
        taken = [int(np.argmin(alone))]
    return {place for group in taken for place in by_group[group].tolist()}


def _grown(counts: NDArray[np.int64], missing: NDArray[np.float64]) -> float:
    """By how much the squared distance to what is missing grows with these images."""
    return float((counts * (counts - 2 * missing)).sum())
