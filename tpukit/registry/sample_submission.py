"""A sample submission: what `predict` wrote must have its columns, its ids and their order."""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from pathlib import Path

from tpukit.errors import DataError
from tpukit.io.files import CsvTable, read_csv_table, write_csv

SHOWN = 3
"""Names in a message."""


def match_sample(written: Path, sample: CsvTable, log: Callable[[str], None]) -> None:
    """Puts the rows and columns of a written file into the sample's order.

    Raises DataError naming the ids and the columns that only one of the two has.
    """
    made = read_csv_table(written)
    differences = _differences("column", made.columns, sample.columns)
    shared = [name for name in sample.columns if name in made.columns]
    values = {name: (_column(made, name), _column(sample, name)) for name in shared}
    # Ids are the first column, or one that alone has the same values in both.
    same = [name for name, (own, given) in values.items() if Counter(own) == Counter(given)]
    key = next(iter(same), sample.columns[0])
    if key in values:
        differences += _differences("id", *values[key])
    if differences:
        raise DataError(
            f"{written} does not match {sample.path}: {'; '.join(differences)}.",
            "The file stays as the task wrote it. Predict what the sample names, or leave"
            " --sample-submission out.",
        )
    columns = [made.columns.index(name) for name in sample.columns]
    rows = _in_order(made.rows, made.columns.index(key), values[key][1])
    ordered = [sample.columns, *([row[i] for i in columns] for row in rows)]
    if ordered != [made.columns, *made.rows]:
        write_csv(written, ordered)
        log(f"{written}: put into the order of {sample.path}")


def _column(table: CsvTable, name: str) -> list[str]:
    place = table.columns.index(name)
    return [row[place] for row in table.rows]


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
