"""Predictions of test rows that are trained on as soft labels (pseudo-labels)."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tpukit.errors import DataError
from tpukit.io.mirror import local_copy
from tpukit.io.process import is_first_rank
from tpukit.io.tables import Table, column_place, plain_name, table_file
from tpukit.train.labelled import TableSettings, id_column_of, table_with_rows
from tpukit.train.submission import rows_by_id
from tpukit.train.target import Target, Values, as_number

SUM_TOLERANCE = 1e-3
"""By how much a row's probabilities may miss 1, as rounded ones do."""


class PseudoLabels(NamedTuple):
    """What was predicted of test rows."""

    table: Table
    id_column: str
    values: Values
    """(rows, classes) probabilities; else as `Target.values`, of labels probabilities."""

    def test_rows(self, settings: TableSettings) -> Table:
        """These rows of the test table; see `rows_of`."""
        tests = table_with_rows(table_file(Path(settings.data_path), "test"))
        return self.rows_of(tests, id_column_of(tests, settings.id_column, needed=1))

    def rows_of(self, tests: Table, own: str) -> Table:
        """These rows of a table, given the column of its ids; those of one id in its order. Raises
        DataError for an id that it lacks."""
        places, chosen = rows_by_id(tests.column(own)), []
        for row, name in enumerate(self.table.column(self.id_column)):
            if not (left := places[plain_name(name)]):
                raise DataError(
                    f"{self.table.where(row)}: {tests.path} has no row of {own} {name!r}"
                    f"{' more' * (plain_name(name) in map(plain_name, tests.column(own)))}.",
                    "--set pseudo= names predictions of the test table's rows.",
                )
            chosen.append(left.popleft())
        return replace(
            tests, rows=[tests.rows[p] for p in chosen], lines=[tests.lines[p] for p in chosen]
        )


def pseudo_labels(settings: TableSettings, target: Target) -> PseudoLabels | None:
    """What the setting `pseudo` names; None where it is not set.

    Raises DataError for other columns than what is learned, and for what is no prediction.
    """
    if settings.pseudo is None:
        return None
    table = table_with_rows(local_copy(settings.pseudo))
    named = settings.id_column
    if named is not None and column_place(table.columns, named) is None:
        named = None
    ids = id_column_of(table, named)
    if is_first_rank():
        print(
            f"Trained on too: {len(table.rows)} rows of {table.path}, with what it predicts.",
            file=sys.stderr, flush=True,
        )  # fmt: skip
    return PseudoLabels(table, ids, _values(table, ids, target))


def soft(target: Target, values: Values) -> Values:
    """Values of a target as those of `PseudoLabels`: of a class its probabilities, 0 and 1."""
    if target.kind != "class":
        return values
    return np.eye(len(target.classes), dtype=np.float32)[values]


def _values(table: Table, id_column: str, target: Target) -> Values:
    columns = [name for name in map(plain_name, table.columns) if name != id_column]
    if target.kind == "class" and len(columns) == 1 and sorted(columns) != sorted(target.classes):
        return _of_one_column(table, columns[0], target)
    if sorted(columns) != sorted(target.predicted):
        learned = ", ".join(target.predicted[:3]) + ", ..." * (len(target.predicted) > 3)
        raise DataError(
            f"{table.path}: beside {id_column} it has the columns {', '.join(columns) or 'none'},"
            f" not one for each of {learned}.",
            "`tpukit predict --set probabilities=true --out pseudo.csv` writes them.",
        )
    values = np.stack([_numbers(table, name, target) for name in target.predicted], 1)
    if target.kind == "class":
        sums = values.sum(1)
        if (wrong := np.flatnonzero(abs(sums - 1) > SUM_TOLERANCE)).size:
            raise DataError(
                f"{table.where(int(wrong[0]))}: the probabilities of its classes add up to"
                f" {sums[wrong[0]]:.4g}, not to 1."
            )
        values = values / sums[:, None]
    return values[:, 0] if target.kind == "score" else values


def _of_one_column(table: Table, name: str, target: Target) -> Values:
    """Classes, or of two classes the probability of the one that names the column, else of the
    second, as `submission.form_of` writes them."""
    texts = [text.strip() for text in table.column(name)]
    if name not in target.classes and {*texts} <= {*target.classes}:
        return soft(target, np.array([target.classes.index(text) for text in texts]))
    if len(target.classes) != 2:
        raise DataError(
            f"{table.path}, column {name}: {min({*texts} - {*target.classes})!r} is not one of the"
            f" classes ({', '.join(target.classes[:3])}, ...).",
            "`tpukit predict --set probabilities=true --out pseudo.csv` writes a column for each.",
        )
    own = _numbers(table, name, target)
    pair = [own, 1 - own] if name == target.classes[0] else [1 - own, own]
    return np.stack(pair, 1)


def _numbers(table: Table, name: str, target: Target) -> Values:
    """A column's probabilities, numbers or scores."""
    least, most = -np.inf, np.inf
    if target.kind in ("class", "labels"):
        least, most = 0.0, 1.0
    elif target.kind == "score":
        least, most = target.grades[0], target.grades[-1]
    found = []
    for row, text in enumerate(table.column(name)):
        number = as_number(text)
        if number is None or not least <= number <= most:
            limits = f" from {least:g} to {most:g}" if np.isfinite(most) else ""
            raise DataError(f"{table.where(row)}: {name} is {text!r}, not a number{limits}.")
        found.append(number)
    return np.array(found, np.float32)
