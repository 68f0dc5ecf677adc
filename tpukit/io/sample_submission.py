"""A sample submission: what `predict` writes must have its columns, its ids and their order."""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from pathlib import Path

from tpukit.errors import DataError
from tpukit.io.tables import Table, column_place, plain_name, read_table, write_csv

SHOWN = 3
"""Names in a message."""


def match_sample(written: Path, sample: Table, log: Callable[[str], None]) -> None:
    """Puts the rows and columns of a written file into the sample's order, under its names.

    Raises DataError naming the ids and the columns that only one of the two has.
    """
    made = read_table(written)
    shared = [name for name in sample.columns if column_place(made.columns, name) is not None]
    values = {name: (_plain(made, name), _plain(sample, name)) for name in shared}
    # Ids are the first column, or one that alone has the same values in both.
    same = [name for name, (own, given) in values.items() if Counter(own) == Counter(given)]
    key = next(iter(same), sample.columns[0])
    ids = values.get(key, ([], []))
    differences = _differences("column", made.columns, sample.columns)
    differences += _differences("id", *ids)
    if differences:
        raise DataError(
            f"{written} does not match {sample.path}: {'; '.join(differences)}.",
            "The file stays as the task wrote it. Predict what the sample names, or leave"
            " --sample-submission out.",
        )
    by_id: dict[str, deque[int]] = defaultdict(deque)
    for row, name in enumerate(ids[0]):
        by_id[name].append(row)
    # Rows of one id keep their order; an id is written as the sample spells it.
    order = [by_id[name].popleft() for name in ids[1]]
    columns = [
        sample.column(name) if name == key else [made.column(name)[row] for row in order]
        for name in sample.columns
    ]
    ordered = [sample.columns, *map(list, zip(*columns, strict=True))]
    if ordered != [made.columns, *made.rows]:
        write_csv(written, ordered)
        log(f"{written}: put into the order of {sample.path}")


def require_match(columns: Sequence[str], ids: Sequence[str], sample: Table) -> None:
    """Raises DataError where a sample has other columns or, in its first one, other ids."""
    differences = _differences("column", columns, sample.columns)
    differences += _differences("id", ids, [row[0] for row in sample.rows])
    if differences:
        raise DataError(
            f"The submission would not match {sample.path}: {'; '.join(differences)}.",
            "Give the sample submission and the test file of the same data.",
        )


def _plain(table: Table, name: str) -> list[str]:
    return [plain_name(value) for value in table.column(name)]


def _differences(kind: str, made: Sequence[str], expected: Sequence[str]) -> list[str]:
    """What is missing and what is too many, `kind` by `kind`."""
    counts = Counter(map(plain_name, made)), Counter(map(plain_name, expected))
    parts = {"lacks": counts[1] - counts[0], "should not have": counts[0] - counts[1]}
    return [
        f"it {verb} {len(names)} {kind}{'s' if len(names) > 1 else ''}"
        f" ({', '.join(names[:SHOWN])}{', ...' if len(names) > SHOWN else ''})"
        for verb, found in parts.items()
        if (names := list(found.elements()))
    ]
