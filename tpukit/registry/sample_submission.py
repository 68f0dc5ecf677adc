"""A sample submission: what `predict` wrote must have its columns, its ids and their order."""

import csv
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tpukit.errors import DataError
from tpukit.io.files import write_csv

SHOWN = 3
"""Names in a message."""


@dataclass(frozen=True)
class CsvTable:
    """A CSV file's text; the first column holds the ids."""

    path: Path
    columns: list[str]
    rows: list[list[str]]


def read_csv_table(path: Path) -> CsvTable:
    """Reads a table with a header. Raises DataError for a file that is not one."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            records = [record for record in csv.reader(file, strict=True) if record]
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: not a CSV file in UTF-8 ({error}).") from error
    if not records:
        raise DataError(f"{path} is empty.", "Expected a header and a row for each id.")
    columns, *rows = records
    for number, row in enumerate(rows, start=1):
        if len(row) != len(columns):
            raise DataError(
                f"{path}, row {number}: {len(row)} values under {len(columns)} columns.",
                "Expected a value for each column, between commas.",
            )
    return CsvTable(path, columns, rows)


def match_sample(written: Path, sample: CsvTable, log: Callable[[str], None]) -> None:
    """Puts the rows and columns of a written file into the sample's order.

    Raises DataError naming the ids and the columns that only one of the two has.
    """
    made = read_csv_table(written)
    differences = _differences("column", made.columns, sample.columns)
    ids = [row[0] for row in sample.rows]
    if sample.columns[0] in made.columns:
        place = made.columns.index(sample.columns[0])
        differences += _differences("id", [row[place] for row in made.rows], ids)
    if differences:
        raise DataError(
            f"{written} does not match {sample.path}: {'; '.join(differences)}.",
            "The file stays as the task wrote it. Predict what the sample names, or leave"
            " --sample-submission out.",
        )
    columns = [made.columns.index(name) for name in sample.columns]
    rows = _in_order(made.rows, columns[0], ids)
    ordered = [sample.columns, *([row[i] for i in columns] for row in rows)]
    if ordered != [made.columns, *made.rows]:
        write_csv(written, ordered)
        log(f"{written}: put into the order of {sample.path}")


def _differences(kind: str, made: Sequence[str], expected: Sequence[str]) -> list[str]:
    """What is missing and what is too many, `kind` by `kind`."""
    counts = Counter(made), Counter(expected)
    parts = {"lacks": counts[1] - counts[0], "should not have": counts[0] - counts[1]}
    return [
        f"it {verb} {len(names)} {kind}{'s' if len(names) > 1 else ''}"
        f" ({', '.join(names[:SHOWN])}{', ...' if len(names) > SHOWN else ''})"
        for verb, found in parts.items()
        if (names := list(found.elements()))
    ]


def _in_order(rows: Sequence[list[str]], column: int, ids: Sequence[str]) -> list[list[str]]:
    """The rows by the id in a column, in the order of `ids`; rows of one id keep theirs."""
    by_id: dict[str, deque[list[str]]] = defaultdict(deque)
    for row in rows:
        by_id[row[column]].append(row)
    return [by_id[name].popleft() for name in ids]
