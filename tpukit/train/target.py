"""What is predicted: a class, several labels, numbers or an ordered score, of which columns."""

import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray

from tpukit.errors import DataError
from tpukit.io.tables import Table

Kind = Literal["class", "labels", "number", "score"]
Values = NDArray[Any]
ZERO_OR_ONE = {
    "0": 0, "0.0": 0, "False": 0, "false": 0, "FALSE": 0, "1": 1, "1.0": 1, "True": 1, "true": 1,
    "TRUE": 1,
}  # fmt: skip
NUMBER = re.compile(r"[+-]?\d*\.?\d+(e[+-]?\d+)?", re.IGNORECASE)
GROUPED = re.compile(r"[+-]?[1-9]\d{0,2}(,\d{3})+(\.\d+)?")
"""A number whose comma may separate thousands."""
MISSING = ("na", "nan", "n/a", "#n/a", "<na>", "nat", "null", "-nan")
"""What programs write where a number is missing, in small letters."""
DEFAULT_METRICS: Mapping[Kind, str] = {
    "class": "accuracy,log_loss", "labels": "auc,macro_f1", "number": "rmse,mae",
    "score": "qwk,rmse",
}  # fmt: skip
"""What is said of predictions where no metric is asked for."""
SHOWN = 3
"""Names in a message."""


@dataclass(frozen=True)
class Target:
    """What a model predicts."""

    kind: Kind
    columns: tuple[str, ...]
    """Columns of the training table: one, or one for each label, number or class; of joined labels
    these."""
    classes: tuple[str, ...] = ()
    """The classes, the labels (the columns), or the scores from the lowest; none of numbers."""
    why: str = ""
    """What decided it, for a log line."""
    others: tuple[str, ...] = ()
    """Columns of the training table that are not learned."""
    counts: tuple[int, ...] = ()
    """Training rows of each class, or with each label."""
    mean: tuple[float, ...] = ()
    """Mean of each number, or of the score, over the training rows."""
    spread: tuple[float, ...] = ()
    """Their standard deviations; 1 for a constant."""
    joined: str = ""
    """The column of the training table that holds a row's labels, with blanks between."""

    @classmethod
    def from_json(cls, content: bytes | str) -> Self:
        found: dict[str, Any] = json.loads(content)
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in found.items()
        }
        return cls(**values)

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @property
    def is_one_hot(self) -> bool:
        """Whether each class has a column of 0 and 1."""
        return self.kind == "class" and len(self.columns) > 1

    @property
    def allows_gaps(self) -> bool:
        """Whether a row may lack some of the values (NaN), which are left out."""
        return self.kind == "number" and len(self.columns) > 1

    @property
    def of_table(self) -> tuple[str, ...]:
        """The columns of the table that hold it."""
        return (self.joined,) if self.joined else self.columns

    @property
    def predicted(self) -> tuple[str, ...]:
        """Names of the columns of raw predictions: probabilities, numbers, the expected score."""
        return self.classes if self.kind in ("class", "labels") else self.columns

    @property
    def grades(self) -> Values:
        """(scores,) the numbers of a score, from the lowest."""
        return np.array([as_number(name) for name in self.classes], np.float64)

    def __str__(self) -> str:
        """`number Pawpularity`, for a log line."""
        names = ", ".join(self.columns[:SHOWN]) + ", ..." * (len(self.columns) > SHOWN)
        many = f"{len(self.classes)} classes by the column" + "s" * (len(self.columns) > 1)
        if self.joined:
            return f"{len(self.columns)} labels ({names}), several in a field of {self.joined}"
        kinds = {
            "class": many,
            "labels": f"{len(self.columns)} labels, each 0 or 1, in the columns",
            "number": "a number in the column" if len(self.columns) == 1
            else f"{len(self.columns)} numbers in the columns",
            "score": f"an ordered score ({' < '.join([*self.classes[:2], '...'])}"
            f" < {self.classes[-1]}) in the column" if self.classes else "an ordered score in",
        }  # fmt: skip
        return f"{kinds[self.kind]} {names}"

    def remark(self) -> str:
        """The line before training."""
        return (
            f"Learning {self} ({self.why}); another: --set columns=NAME, or --set target="
            + "|".join(kind for kind in get_args(Kind) if kind != self.kind)
        )

    # -- values ----------------------------------------------------------------------------------
    def values(self, table: Table) -> Values:
        """A table's rows: (rows,) positions of classes, (rows,) scores, or (rows, columns) labels
        or numbers. Raises DataError naming the first row that does not fit."""
        if self.joined:
            fields = [text.split() for text in filled(table, self.joined)]
            words = {word for words in fields for word in words}
            require_known(words, self.classes, f"{table.path}, column {self.joined!r}")
            places = {name: place for place, name in enumerate(self.classes)}
            ones = np.zeros((len(fields), len(places)), np.float32)
            for row, own in enumerate(fields):
                ones[row, [places[word] for word in own]] = 1
            return ones
        texts = [filled(table, name, gaps=self.allows_gaps) for name in self.columns]
        if self.is_one_hot:
            texts = [self._names_of_ones(table, texts)]
        columns = [self._column(table, *pair) for pair in zip(self.columns, texts, strict=False)]
        if self.kind in ("labels", "number"):
            return np.stack(columns, 1)
        return columns[0]

    def _column(self, table: Table, name: str, texts: Sequence[str]) -> Values:
        known = {text: place for place, text in enumerate(self.classes)}
        if self.kind == "class":
            require_known({*texts}, self.classes, f"{table.path}, column {name!r}")
            found: list[float | None] = [known[text] for text in texts]
            expected = "a class"
        elif self.kind == "labels":
            found, expected = [ZERO_OR_ONE.get(text) for text in texts], "0 or 1"
        else:
            require_decimal_commas(texts, f"{table.path}, column {name!r}")
            gap = math.nan if self.allows_gaps else None
            found = [gap if is_missing(text) else as_number(text) for text in texts]
            expected = "a number"
            if self.kind == "score" and self.classes:
                expected = f"a score from {self.classes[0]} to {self.classes[-1]}"
                grades = {*self.grades.tolist()}
                found = [number if number in grades else None for number in found]
        if None in found:
            row = found.index(None)
            raise DataError(
                f"{table.where(row)}: {name} is {texts[row]!r}, not {expected}.",
                "Correct it, or name another kind or column: --set target=, --set columns=",
            )
        return np.array(found, np.int64 if self.kind == "class" else np.float32)

    def _names_of_ones(self, table: Table, texts: Sequence[Sequence[str]]) -> list[str]:
        names = []
        for number, row in enumerate(zip(*texts, strict=True)):
            ones = [n for n, v in zip(self.columns, row, strict=True) if ZERO_OR_ONE.get(v)]
            if len(ones) != 1:
                raise DataError(
                    f"{table.where(number)}: {len(ones)} of the columns"
                    f" {', '.join(self.columns[:SHOWN])}, ... are 1: a row has one class here.",
                    "For several labels: --set target=labels",
                )
            names += ones
        return names

    def fitted(self, values: Values) -> Self:
        """With the counts, or mean and standard deviation, of training rows."""
        if self.kind == "class":
            counts = np.bincount(values, minlength=len(self.classes))
            return replace(self, counts=tuple(counts.tolist()))
        columns = values.reshape(len(values), -1).astype(np.float64)
        spread = np.nanstd(columns, 0)
        found = replace(
            self, mean=tuple(np.nanmean(columns, 0).tolist()),
            spread=tuple(np.where(spread > 0, spread, 1.0).tolist()),
        )  # fmt: skip
        if self.kind == "number":
            return found
        ones = columns if self.kind == "labels" else columns == self.grades
        return replace(found, counts=tuple(int(count) for count in ones.sum(0)))

    def blank(self, *, soft: bool = False) -> Values:
        """A value of one row, of the form of those in a batch; soft: of classes' probabilities."""
        if soft and self.kind == "class":
            return np.full(len(self.classes), 1 / len(self.classes), np.float32)
        many = (len(self.predicted),) if self.kind in ("labels", "number") else ()
        least = self.grades[0] if self.kind == "score" else 0
        return np.full(many, least, np.int64 if self.kind == "class" else np.float32)

    def strata(self, values: Values) -> list[int]:
        """What folds share out evenly: classes, sets of labels, scores, tenths of a number."""
        if self.kind == "number":
            ranks = values[:, 0].argsort(kind="stable").argsort(kind="stable")
            values = ranks * 10 // max(1, len(ranks))
        found: list[int] = np.unique(values, axis=0, return_inverse=True)[1].ravel().tolist()
        return found


def require_known(found: Collection[str], known: Sequence[str], place: str) -> None:
    """Raises DataError for classes that a model does not know."""
    if new := sorted({*found} - {*known} - {""}):
        raise DataError(
            f"{place}: class {new[0]!r} is not one of the model's {len(known)}"
            f" ({', '.join(known[:SHOWN])}, ...).",
            "Use the classes that the run was trained on, or train a new run (--results-dir).",
        )


def filled(table: Table, name: str, *, gaps: bool = False) -> list[str]:
    """A column without blanks around. Raises DataError for a row that has none; gaps: rows may."""
    texts = [value.strip() for value in table.column(name)]
    if "" in texts and not gaps:
        where = table.where(texts.index(""))
        raise DataError(f"{where}: there is no {name}.", "Fill it in, or remove the row.")
    return texts


# -- values --------------------------------------------------------------------------------------
def require_decimal_commas(texts: Iterable[str], place: str) -> None:
    """Raises DataError where each comma of a column may separate thousands, as in 1,234."""
    commas = [text.strip() for text in texts if "," in text]
    if commas and all(map(GROUPED.fullmatch, commas)):
        raise DataError(
            f"{place}: whether the comma of {commas[0]!r} separates thousands is not known.",
            "Write numbers without separators, with a decimal point.",
        )


def as_number(text: str) -> float | None:
    """The number that a field holds, also with a comma; None where it holds another text."""
    if "_" in text:  # which float() leaves out
        return None
    try:
        number = float(text.replace(",", ".", 1))
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def is_missing(text: str) -> bool:
    """Whether a field is empty, or says that its value is missing."""
    return not text or text.lower() in MISSING


def numbers_first(names: Iterable[str]) -> list[str]:
    """Classes: numbers (not "nan", which has no order) by their size, then the other names."""
    return sorted(names, key=lambda n: (0, float(n), n) if NUMBER.fullmatch(n) else (1, 0.0, n))


def named_by(columns: Sequence[str], names: Collection[str]) -> tuple[str, ...]:
    """Which of `names` each column stands for, that may begin with the same letters as the others
    (Class_1); none: they are of something else."""
    shortest = min(map(len, columns)) if len(columns) == len(names) > 1 else 1
    for start in range(shortest):
        if len({name[:start] for name in columns}) > 1:
            break
        if {*(found := [name[start:] for name in columns])} == {*names}:
            return tuple(found)
    return ()


def words_of(texts: Iterable[str]) -> set[str]:
    return {word for text in texts for word in text.split()}
