"""What is learned from a table: the columns to predict, and whether they hold classes.

The sample submission decides, else what the test table lacks, then names and values. What nothing
decides is an error: a wrong column trains without a sign.
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tpukit.errors import DataError
from tpukit.io.tables import Table, is_table_name, open_table, plain_name, read_table, table_file

FOLD_NAMES = ("fold", "folds", "kfold")
"""Columns of a table that look like folds."""
LABEL_NAMES = ("label", "labels", "class", "class_name", "category", "target", "diagnosis")
"""Columns of a table that look like classes, the likeliest first."""
SAMPLE_NAME = re.compile(r"sample_?submission\.", re.IGNORECASE)
ZERO_OR_ONE = {"0": 0, "0.0": 0, "1": 1, "1.0": 1}
MOST_GRADES = 10
"""Different numbers that may be classes although they are not whole, such as 1.5 and 2.5."""


@dataclass(frozen=True)
class LearnedColumns:
    """The columns that are learned."""

    columns: tuple[str, ...]
    kind: Literal["classes", "one-hot", "labels", "number"]
    """A class in one column; a column for each class, of which one is 1 in each row, or several
    are; a quantity."""
    why: str
    """What decided it, for a log line."""


def learned_columns(
    table: Table, ids: str, *, named: str | None = None, setting: str = "label_column",
    apart: Collection[str | None] = (), classes: Sequence[str] | None = None,
    sample: Table | None = None, tests: Collection[str] = (),
) -> LearnedColumns:  # fmt: skip
    """What a table's rows are labelled with.

    ids: the column of the ids; named: what the setting `setting` says; apart: columns of folds and
    groups; classes: those of a run that goes on; tests: columns of the test table, which are known
    when it is predicted.

    Raises DataError listing the columns where several are possible.
    """
    others = [name for name in map(plain_name, table.columns) if name and name != ids]
    others = [name for name in others if not name.startswith("Unnamed: ")]
    others = [name for name in others if name not in apart and name.lower() not in FOLD_NAMES]
    values = {name: {*map(str.strip, table.column(name))} for name in others}
    found = ([named], setting) if named is not None else _asked(values, ids, sample)
    if found is None:
        tested = {*map(plain_name, tests)}
        left = [name for name in others if name not in tested] or others
        found = _likely({name: values[name] for name in left}, len(table.rows), classes, sample)
    if found is None:
        raise DataError(
            f"{table.path}: which column is to be predicted is not clear:"
            f" {', '.join(others) or 'there is none beside the ids'}.",
            f"Name it: --set {setting}=NAME, or put sample_submission.csv beside the table.",
        )
    return LearnedColumns(tuple(found[0]), _kind(table, found[0], sample), found[1])


def _asked(
    values: Mapping[str, set[str]], ids: str, sample: Table | None
) -> tuple[Sequence[str], str] | None:
    """The columns that a sample submission has, or the one whose values its columns are."""
    if sample is None:
        return None
    asked = [name for name in map(plain_name, sample.columns) if name != ids]
    if found := [name for name in asked if name in values]:
        return found, f"named in {sample.path.name}"
    found = [name for name in values if len(asked) > 1 and values[name] <= {*asked}]
    return (found[:1], f"its values are columns of {sample.path.name}") if found else None


def _likely(
    values: Mapping[str, set[str]],
    rows: int,
    classes: Sequence[str] | None,
    sample: Table | None,
) -> tuple[Sequence[str], str] | None:
    """The columns that their number, names or values decide."""
    if len(values) == 1:
        return [*values], "the only one to predict"
    for label in LABEL_NAMES:
        if named := [name for name in values if name.lower() == label]:
            return named[:1], "its name"
    binary = [name for name in values if values[name] <= ZERO_OR_ONE.keys()]
    likely = [n for n in values if 1 < len(values[n]) < rows or _has_parts(values[n])]
    # Unless a sample asks for something else, such as whose image it is.
    likely = [name for name in likely if sample or not name.lower().endswith("id")]
    if len(binary) > 1 and {*likely} <= {*binary}:
        return binary, "they hold 0 and 1 alone"
    if len(likely) != 1 and classes is not None:
        likely = [name for name in values if values[name] <= {*classes}]
    return (likely, "the only one whose values are classes") if len(likely) == 1 else None


def _kind(
    table: Table, columns: Sequence[str], sample: Table | None
) -> Literal["classes", "one-hot", "labels", "number"]:
    values = [table.column(name) for name in columns]
    if len(columns) > 1:
        if not all(value.strip() in ZERO_OR_ONE for column in values for value in column):
            return "number"
        ones = [sum(ZERO_OR_ONE[v.strip()] for v in row) for row in zip(*values, strict=True)]
        return "one-hot" if {*ones} == {1} else "labels"
    present = {value.strip() for value in values[0]} - {""}
    if None in map(as_number, present):
        return "classes"
    is_asked = sample is not None and columns[0] in map(plain_name, sample.columns)
    wanted = sample.column(columns[0]) if sample and is_asked else []
    if len(present) > MOST_GRADES and _has_parts(present):
        return "number"
    return "number" if len(present) > 2 and _has_parts(wanted) else "classes"


def as_number(text: str) -> float | None:
    """The number that a field holds, also with a comma; None where it holds another text."""
    try:
        number = float(text.replace(",", ".", 1))
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _has_parts(values: Collection[str]) -> bool:
    """Whether they are numbers that are not all whole."""
    numbers = [as_number(value) for value in values]
    return None not in numbers and any(number and number % 1 for number in numbers)


def sample_beside(folder: Path, named: str | None = None) -> Table | None:
    """The sample submission of a data folder: the one that is named, or looks like one."""
    if named is not None:
        return read_table(folder / named)
    likely = (path for path in folder.glob("*") if is_table_name(path))
    names = (path for path in likely if SAMPLE_NAME.match(path.name))
    path = min(names, default=None)
    return None if path is None else read_table(path)


def columns_of_tests(folder: Path) -> list[str]:
    """The columns of a data folder's test table; none where there is none."""
    path = table_file(folder, "test")
    return open_table(path).columns if path.is_file() else []
