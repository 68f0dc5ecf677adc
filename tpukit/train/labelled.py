"""Labelled rows of a table, for any task: what is predicted of them, and which are validated on."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tpukit.errors import ConfigError, DataError
from tpukit.io.ranges import Range, setting
from tpukit.io.tables import (
    Table,
    column_place,
    is_table_name,
    open_table,
    plain_name,
    read_table,
    table_file,
)
from tpukit.train.submission import require_names
from tpukit.train.target import Kind, Target, Values
from tpukit.train.target_choice import FOLD_NAMES, LABEL_NAMES, learned_target

SAMPLE_NAMES = ("sample_submission.", "samplesubmission.")
"""How the names of sample submissions begin, in small letters."""
NO_SAMPLE, ALL = "none", "all"
SPLIT_SEED = 0


@dataclass(frozen=True)
class TableSettings:
    """Settings of a task that learns from a table; a task's own settings inherit them."""

    data_path: str = "./data"
    """Folder of the data."""
    table: str | None = None
    """Table of ids and labels, in the data path (default: train.csv, where there is one)."""
    id_column: str | None = None
    """Column of the ids (default: the one that the sample submission shares, else the first)."""
    columns: str | None = None
    """Columns to predict, separated by commas (default: the sample submission's, what test.csv
    lacks, label or the like, else the only one whose values repeat)."""
    target: Kind | None = None
    """What they hold: class, labels (0 or 1 each), number or score (ordered), by the values."""
    sample_submission: str | None = None
    """Sample submission in the data path, whose columns are learned, or none (default:
    sample_submission.csv, where there is one)."""
    valid_fraction: float = setting(0.1, Range(0, 0.9, whole=False))
    """Part of each class that is validated on, where the data has no validation part."""
    folds: int | None = setting(None, Range(2, 100))
    """Number of parts of which `fold` is validated on; `--folds N` trains all."""
    fold: str | None = None
    """Validate on this of the `folds` (from 0), or on the rows with this value in `fold_column`."""
    fold_column: str | None = None
    """Column of the table that numbers its folds (default: fold, unless `folds` makes them)."""
    group_column: str | None = None
    """Column of the table whose equal values (a patient, a video) stay in one part."""
    pseudo: str | None = None
    """File of predictions of the test rows (as `predict` writes them), which are trained on too,
    with these as soft labels."""

    def problems(self) -> Iterator[str]:
        """What is wrong with the settings of folds."""
        if self.fold is None and (self.fold_column is not None or self.folds is not None):
            yield "fold_column and folds need the fold to validate on: --set fold=0."
        if self.folds is not None and self.fold_column is not None:
            yield "folds and fold_column exclude each other."
        if self.fold is not None and self.folds is None and self.group_column is not None:
            yield "fold and group_column exclude each other without folds."
        if self.folds is not None and self.fold not in (None, *map(str, range(self.folds))):
            yield f"fold {self.fold} is not one of 0 to {self.folds - 1}."


class LabelledTable(NamedTuple):
    """A table with what is predicted of its rows."""

    table: Table
    id_column: str
    target: Target
    values: Values
    """Values of each row; see `Target.values`."""

    @property
    def ids(self) -> list[str]:
        return self.table.column(self.id_column)


def training_table(settings: TableSettings) -> Table | None:
    """The table of ids and labels. Raises DataError where a setting needs one that is not there."""
    root = Path(settings.data_path)
    path = root / settings.table if settings.table else table_file(root, "train")
    for name in ("table", "columns", "target", "fold", "fold_column", "group_column"):
        made = name == "fold" and settings.folds is not None
        if getattr(settings, name) is not None and not made and not path.is_file():
            raise DataError(
                f"{name} {getattr(settings, name)!r}: there is no table {path}.",
                "Name one of ids and labels in the data path: --set table=train.csv",
            )
    return table_with_rows(path) if path.is_file() else None


def table_with_rows(path: Path) -> Table:
    """A table. Raises DataError where it has no rows."""
    table = read_table(path)
    if not table.rows:
        raise DataError(f"{path} has no rows.", "Expected a header and a row for each sample.")
    return table


def labelled(
    table: Table, settings: TableSettings, known: Target | None = None,
    features: str | None = None, apart: Collection[str] = (),
) -> LabelledTable:  # fmt: skip
    """The rows of a table with what is learned of them.

    known: what a run has learned, which is not looked for again; features: the setting, whose
    columns are not learned; apart: further ones.

    Raises DataError for what is not clear or does not fit.
    """
    root = Path(settings.data_path)
    sample = sample_beside(root, settings.sample_submission)
    tests = columns_of_tests(root)
    ids = id_column_of(table, settings.id_column, sample, tests)
    if known is None:
        named = [n.strip() for n in settings.columns.split(",")] if settings.columns else None
        beside = map(plain_name, (*(features.split(",") if features else ()), *apart))
        wanted = {*map(plain_name, sample.columns)} if sample else set()
        others = (*({*beside} - wanted), settings.fold_column, settings.group_column)
        known = learned_target(
            table, ids, named, kind=settings.target, apart=others, sample=sample, tests=tests
        )
    return LabelledTable(table, ids, known, known.values(table))


def id_column_of(
    table: Table, named: str | None, sample: Table | None = None, tests: Sequence[str] = (),
    needed: int = 2,
) -> str:  # fmt: skip
    """The column of the ids: the one that is named, else that of the sample and the test table,
    else the first that does not look like labels.

    needed: columns that a table must have; where there are more, pandas' index is none of them.
    """
    if named is not None:
        column_of(table, "id_column", named)
        return plain_name(named)
    names = [plain_name(name) for name in table.columns]
    for others in (sample.columns[:1] if sample else [], tests[:1]):
        shared = [name for name in map(plain_name, others) if name in names]
        if shared and not shared[0].startswith("Unnamed: ") and shared[0] not in LABEL_NAMES:
            return shared[0]
    found = [name for name in names if name and not name.startswith("Unnamed: ")]
    found = found if len(found) >= needed else names
    return next((name for name in found if name.lower() not in LABEL_NAMES), found[0])


def column_of(table: Table, setting: str, name: str) -> list[str]:
    """The values of the column that a setting, or an option, names. Raises DataError where there is
    none."""
    if column_place(table.columns, name) is None:
        raise DataError(
            f"{table.path}: {setting} {name}: there is no such column.",
            f"Its columns are {', '.join(table.columns)}:"
            + (f" {setting} NAME" if setting.startswith("--") else f" --set {setting}=NAME"),
        )
    return table.column(name)


def sample_beside(folder: Path, named: str | None = None) -> Table | None:
    """The sample submission of a data folder: the one that is named, or looks like one."""
    if named is not None:
        path = None if named == NO_SAMPLE else folder / named
    else:
        likely = (path for path in folder.glob("*") if is_table_name(path))
        path = min((p for p in likely if p.name.lower().startswith(SAMPLE_NAMES)), default=None)
    sample = None if path is None else read_table(path)
    if sample is not None:
        require_names(sample)
    return sample


def columns_of_tests(folder: Path) -> list[str]:
    """The columns of a data folder's test table; none where there is none."""
    path = table_file(folder, "test")
    return open_table(path).columns if path.is_file() else []


def features_of(found: LabelledTable, settings: TableSettings, features: str | None) -> list[str]:
    """The columns that a setting `features` names. Raises ConfigError for one that is not there,
    or that the test table lacks."""
    if features is None:
        return []
    there = [*map(plain_name, found.table.columns)]
    tested = {*map(plain_name, columns_of_tests(Path(settings.data_path)))}
    taken = {found.id_column, *found.target.of_table, settings.fold_column, settings.group_column}
    shared = [n for n in there if n in (tested or there) and n not in taken]
    shared = [name for name in shared if name and name.lower() not in FOLD_NAMES]
    if features == ALL:
        return [name for name in shared if not name.startswith("Unnamed: ")]
    names = [plain_name(name) for name in features.split(",")]
    if wrong := [name for name in names if name not in shared]:
        lacks = f"not a column of the {'test' if wrong[0] in there else 'training'} table."
        what = "it holds the ids, folds or what is learned." if wrong[0] in taken else lacks
        raise ConfigError(
            f"features {wrong[0]}: {what}", f"Columns that both have: {', '.join(shared)}."
        )
    return names


def remarks_on_parts(table: Table, target: Target, settings: TableSettings) -> Iterator[str]:
    """Lines about a column of folds that is not used, and rows without a group."""
    names = map(plain_name, table.columns)
    folds = [n for n in names if n.lower() in FOLD_NAMES and n not in target.of_table]
    if folds and settings.fold is None and settings.group_column is None:
        yield (
            f"The table's column {folds[0]} is not used; to validate on one of its folds:"
            f" --set fold_column={folds[0]} --set fold=0"
        )
    if (column := settings.group_column) is not None:
        groups = named_parts(table, "group_column", column)
        if count := groups.count(None):
            yield f"{count} of {len(groups)} rows have no {column}: each is a group of its own."


# -- the part for validation ---------------------------------------------------------------------
def validation_rows_of(
    found: LabelledTable, settings: TableSettings, same: Sequence[str] | None = None
) -> set[int]:
    """The rows to validate on: a fold, or a fraction of each class, by whole groups if asked.

    same: values that rows of one sample share, which stay in one part (default: the ids).
    """
    table, strata = found.table, found.target.strata(found.values)
    groups = found.ids if same is None else same
    if settings.fold is not None and settings.folds is None:
        column = settings.fold_column or "fold"
        values = named_parts(table, "fold_column", column)
        return _of_fold(table.path, column, values, settings.fold)
    if settings.group_column is not None:
        names = named_parts(table, "group_column", settings.group_column)
        groups = [name or f"{own}\n" for name, own in zip(names, groups, strict=True)]
    return split_rows(
        strata, groups, fold=settings.fold, folds=settings.folds, fraction=settings.valid_fraction
    )


def named_parts(table: Table, setting: str, column: str) -> list[str | None]:
    """The group or fold of each row; None where the column, which a setting names, has none."""
    names = map(str.strip, column_of(table, setting, column))
    return [None if name.lower() in ("", "nan") else name for name in names]


def split_rows(
    strata: Sequence[Any], groups: Sequence[Any] | None = None, *, fold: str | int | None = None,
    folds: int | None = None, fraction: float = 0.1,
) -> set[int]:  # fmt: skip
    """The rows to validate on: fold `fold` of `folds`, else a fraction; the same in each call.

    strata: a value for each row, which the parts share out evenly; groups: values that stay whole.
    """
    strata = np.unique(np.array(strata), return_inverse=True)[1].ravel().tolist()
    if groups is not None and len({*groups}) == len(groups):
        groups = None
    if folds is not None:
        numbers = fold_numbers(strata, groups, folds)
        return {*np.flatnonzero(numbers == int(fold or 0)).tolist()}
    if groups is None:
        return stratified(strata, fraction)
    return stratified_groups(strata, groups, fraction)


def fold_numbers(
    strata: Sequence[int], groups: Sequence[Any] | None, folds: int
) -> NDArray[np.int64]:
    """(rows,) the fold of each row, by scikit-learn's shuffled splitters: each class is shared out
    evenly, and groups stay whole.

    Raises ConfigError for fewer rows or groups than folds.
    """
    import warnings

    from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold

    count = len(strata) if groups is None else len({*groups})
    if count < folds:
        raise ConfigError(
            f"{folds} folds of {count} {'rows' if groups is None else 'groups'}.",
            f"Use --folds {max(2, count)} or fewer.",
        )
    if np.bincount(np.array(strata)).max() < folds:  # which these splitters refuse
        strata = [0] * len(strata)
    splitter = StratifiedKFold if groups is None else StratifiedGroupKFold
    numbers = np.zeros(len(strata), np.int64)
    with warnings.catch_warnings(action="ignore"):  # of classes with fewer rows than folds
        parts = splitter(folds, shuffle=True, random_state=SPLIT_SEED).split(
            np.zeros(len(strata)), strata, groups
        )
        for number, (_, rows) in enumerate(parts):
            numbers[rows] = number
    return numbers


def _of_fold(table: Path, column: str, values: Sequence[str | None], fold: str) -> set[int]:
    """The rows whose value in a table's column is `fold`.

    Raises DataError where none has it, or every row.
    """
    chosen = {place for place, value in enumerate(values) if value == fold}
    if len(chosen) in (0, len(values)):
        there = ", ".join(sorted({value for value in values if value})[:10])
        many = "every" if chosen else "no"
        raise DataError(
            f"{table}: {many} row has {fold!r} in the column {column!r}.",
            f"Its values are {there}: --set fold=VALUE names those to validate on.",
        )
    return chosen


def stratified(labels: Sequence[int], fraction: float) -> set[int]:
    """A fraction of each class, at least one of those with several rows."""
    array = np.array(labels)
    chosen: set[int] = set()
    for label in np.unique(array).tolist():
        places = np.flatnonzero(array == label)
        order = np.random.default_rng([SPLIT_SEED, label]).permutation(places)
        count = min(round(fraction * len(places)) or int(fraction > 0), len(places) - 1)
        chosen.update(order[:count].tolist())
    return chosen


def stratified_groups(labels: Sequence[int], groups: Sequence[Any], fraction: float) -> set[int]:
    """Whole groups that make up about a fraction of each class.

    In a drawn order each group is taken that brings the counts of the classes closer to the
    fraction (squared distance); where none does, the one that leaves them closest.
    """
    names, of_row = np.unique(np.array(groups), return_inverse=True)
    array = np.array(labels)
    order = np.random.default_rng(SPLIT_SEED).permutation(len(names))
    by_group = np.split(np.argsort(of_row, kind="stable"), np.cumsum(np.bincount(of_row))[:-1])
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
    """By how much the squared distance to what is missing grows with these rows."""
    return float((counts * (counts - 2 * missing)).sum())
