"""What is predicted: a class, several labels, numbers or an ordered score, of which columns.

The sample submission decides, else what the test table lacks, then names and values. What nothing
decides, and what does not fit, is an error before training: a wrong column trains without a sign.
"""

import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple, Self, get_args

import numpy as np
from numpy.typing import NDArray

from tpukit.errors import DataError
from tpukit.io.tables import Table, column_place, plain_name

Kind = Literal["class", "labels", "number", "score"]
Values = NDArray[Any]
FOLD_NAMES = ("fold", "folds", "kfold")
"""Columns of a table that look like folds."""
LABEL_NAMES = ("label", "labels", "class", "class_name", "category", "target", "diagnosis")
"""Columns of a table that look like classes, the likeliest first."""
SCORE_NAME = re.compile(r"(score|grade|rating|level|severity|stars|isup)", re.IGNORECASE)
"""Names of columns whose whole numbers are in an order that counts."""
CLASS_NAME = re.compile(r"(id|label|class|code|type|category)s?$", re.IGNORECASE)
"""Names of columns whose whole numbers stand for names."""
ZERO_OR_ONE = {
    "0": 0, "0.0": 0, "False": 0, "false": 0, "FALSE": 0, "1": 1, "1.0": 1, "True": 1, "true": 1,
    "TRUE": 1,
}  # fmt: skip
NUMBER = re.compile(r"[+-]?\d*\.?\d+(e[+-]?\d+)?", re.IGNORECASE)
GROUPED = re.compile(r"[+-]?[1-9]\d{0,2}(,\d{3})+(\.\d+)?")
"""A number whose comma may separate thousands."""
MISSING = ("na", "nan", "n/a", "#n/a", "<na>", "nat", "null", "-nan")
"""What programs write where a number is missing, in small letters."""
MOST_GRADES = 10
"""Different numbers that may be classes although they are not whole, such as 1.5 and 2.5."""
MOST_CODES = 30
"""Different whole numbers that are classes although they are not 0 to n - 1."""
MOST_SCORES = 100
"""Different whole numbers that may be a score."""
MOST_SINGLE = 10
"""Classes that may have a row each; numbers and texts have more."""
DEFAULT_METRICS: Mapping[Kind, str] = {
    "class": "accuracy,log_loss", "labels": "auc,macro_f1", "number": "rmse,mae",
    "score": "qwk,rmse",
}  # fmt: skip
"""What is said of predictions where no metric is asked for."""
FEWEST_PARTS = 100
"""Float32's distances between two numbers, to a column's standard deviation."""
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
            fields = [text.split() for text in _filled(table, self.joined)]
            words = {word for words in fields for word in words}
            require_known(words, self.classes, f"{table.path}, column {self.joined!r}")
            places = {name: place for place, name in enumerate(self.classes)}
            ones = np.zeros((len(fields), len(places)), np.float32)
            for row, own in enumerate(fields):
                ones[row, [places[word] for word in own]] = 1
            return ones
        texts = [_filled(table, name) for name in self.columns]
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
            found, expected = [as_number(text) for text in texts], "a number"
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
        spread = columns.std(0)
        found = replace(
            self, mean=tuple(columns.mean(0).tolist()),
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


class Asked(NamedTuple):
    """What a user has set."""

    columns: Sequence[str] | None = None
    kind: Kind | None = None
    apart: Collection[str | None] = ()
    """Columns of folds, groups and features."""


def learned_target(
    table: Table, ids: str, asked: Asked = Asked(), *, sample: Table | None = None,  # noqa: B008
    tests: Collection[str] = (),
) -> Target:  # fmt: skip
    """What a table's rows are labelled with.

    ids: the column of the ids; tests: columns of the test table, which are known when it is
    predicted.

    Raises DataError listing the columns where several are possible, and for what does not fit.
    """
    others = [name for name in map(plain_name, table.columns) if name and name != ids]
    others = [name for name in others if not name.startswith("Unnamed: ")]
    others = [n for n in others if n not in asked.apart and n.lower() not in FOLD_NAMES]
    values = {name: {*map(str.strip, table.column(name))} for name in others}
    tested = {*map(plain_name, tests)}
    left = {name: values[name] for name in others if name not in tested} or values
    wanted = _asked_for(table, sample, ids, left) if sample else []
    found = _named(table, ids, asked.columns, wanted, sample)
    found = found or _in_sample(values, wanted, sample) or _of_columns(left, wanted, sample)
    found = found or _likely(left, len(table.rows), sample)
    if found is None:
        raise DataError(
            f"{table.path}: which column is to be predicted is not clear:"
            f" {', '.join(others) or 'there is none beside the ids'}.",
            "Name it: --set columns=NAME, or put sample_submission.csv beside the table.",
        )
    columns, why = tuple(found[0]), found[1]
    present = [{*_filled(table, name)} for name in columns]
    kind, one_hot = _kind(table, columns, present, wanted, sample)
    if asked.kind is None and kind == "class" and not one_hot:
        _require_none_missing(table, columns[0], present[0])
    if asked.kind is not None:
        kind, one_hot = asked.kind, one_hot and asked.kind == "class"
        why += ", target"
    beside = tuple(name for name in map(plain_name, table.columns) if name not in columns)
    if len(columns) == 1 and (labels := _labels_in(present[0], asked.kind, wanted)):
        return Target("labels", labels, labels, why, beside, joined=columns[0])
    target = Target(kind, columns, (), why, beside)
    if kind == "labels":
        target = replace(target, classes=columns)
    elif kind == "score":
        target.values(table)  # each a number
        target = replace(target, classes=tuple(numbers_first(present[0])))
    elif kind == "class":
        names = {*columns} if one_hot else present[0]
        target = replace(target, classes=_classes(table, target, names, wanted))
    _require_fit(table, target, present, wanted, sample)
    return target


def _asked_for(
    table: Table, sample: Table, ids: str, values: Mapping[str, set[str]]
) -> Sequence[str]:
    """A sample's columns beside its ids, which may have another name than the table's; those of
    classes by these."""
    names = [plain_name(name) for name in sample.columns]
    if ids not in names and column_place(table.columns, names[0]) is None:
        ids = names[0]
    names = [n for n in names if n and n != ids and not n.startswith("Unnamed: ")]
    if any(column_place(table.columns, name) is not None for name in names):
        return names
    return next(filter(None, (named_by(names, texts) for texts in values.values())), names)


def _named(
    table: Table, ids: str, named: Sequence[str] | None, wanted: Sequence[str],
    sample: Table | None,
) -> tuple[Sequence[str], str] | None:  # fmt: skip
    """The columns of the setting `columns`. Raises DataError where the sample asks for others."""
    if not named:
        return None
    named = [plain_name(name) for name in named]
    for name in named:
        if column_place(table.columns, name) is None or name == ids:
            raise DataError(
                f"{table.path}: columns {name}: "
                + ("it holds the ids." if name == ids else "there is no such column."),
                f"Its columns are {', '.join(table.columns)}: --set columns=NAME",
            )
    there = [name for name in wanted if column_place(table.columns, name) is not None]
    if sample is not None and (missed := [name for name in there if name not in named]):
        raise DataError(
            f"columns {', '.join(named)}: {sample.path.name} asks for {', '.join(missed[:SHOWN])},"
            " which the table has too.",
            "Leave columns= out to learn what it asks for; --set sample_submission=none trains"
            " without a sample.",
        )
    return named, "columns"


def _in_sample(
    values: Mapping[str, set[str]], wanted: Sequence[str], sample: Table | None
) -> tuple[Sequence[str], str] | None:
    """The columns that a sample submission has.

    Raises DataError for a sample of which the table has a part.
    """
    found = [name for name in wanted if name in values]
    if sample is None or not found:
        return None
    if missing := [name for name in wanted if name not in values]:
        raise DataError(
            f"{sample.path.name} asks for {', '.join(missing[:SHOWN])}, which the training"
            f" table lacks (it has {', '.join(found[:SHOWN])}).",
            "Give the sample submission of this table: --set sample_submission=FILE, or none.",
        )
    return found, f"named in {sample.path.name}"


def _of_columns(
    values: Mapping[str, set[str]], wanted: Sequence[str], sample: Table | None
) -> tuple[Sequence[str], str] | None:
    """The column whose values are a sample's columns: all of them, else some."""
    if sample is None or len(wanted) < 2:
        return None
    known = {*wanted}
    some = [name for name in values if values[name] <= known]
    fields = [n for n, texts in values.items() if (words_of(texts) or {""}) <= known]
    for found in ([name for name in some if values[name] == known], some, fields):
        if len(found) == 1:
            return found, f"its values are columns of {sample.path.name}"
    return None


def _likely(
    values: Mapping[str, set[str]], rows: int, sample: Table | None
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
    return (likely, "the only one whose values are classes") if len(likely) == 1 else None


def _kind(
    table: Table, columns: Sequence[str], present: Sequence[set[str]], wanted: Sequence[str],
    sample: Table | None,
) -> tuple[Kind, bool]:  # fmt: skip
    """The kind of values, and whether each column is a class."""
    if len(columns) > 1:
        if any(values - ZERO_OR_ONE.keys() for values in present):
            return "number", False
        rows = zip(*(table.column(name) for name in columns), strict=True)
        is_one_hot = {sum(ZERO_OR_ONE.get(v.strip(), 0) for v in row) for row in rows} == {1}
        return ("class", True) if is_one_hot else ("labels", False)
    name = columns[0]
    by_column = len(wanted) > 1 and name not in wanted
    asked = sample.column(wanted[0]) if sample and len(wanted) == 1 else []
    return ("class" if by_column else _kind_of_one(name, present[0], asked)), False


def _kind_of_one(name: str, present: set[str], asked: Sequence[str]) -> Kind:
    """The kind of a column's values; asked: those of the sample submission."""
    found = {*map(as_number, present)}
    numbers = [number for number in found if number is not None]
    if len(numbers) < len(found) or len(numbers) <= 2:
        return "class"
    if _has_parts(present):
        return "number" if len(numbers) > MOST_GRADES or _has_parts(asked) else "class"
    if _has_parts(asked):
        return "number"
    if SCORE_NAME.search(name) and len(numbers) <= MOST_SCORES:
        return "score"
    are_codes = min(numbers) == 0 and max(numbers) == len(numbers) - 1
    is_class = len(numbers) <= MOST_CODES or are_codes or CLASS_NAME.search(name)
    return "class" if is_class else "number"


def _classes(
    table: Table, target: Target, names: set[str], wanted: Sequence[str]
) -> tuple[str, ...]:
    """The classes; those of a sample with a column for each too. Raises DataError where the values
    are no classes."""
    place = f"{table.path}, column {', '.join(target.columns[:SHOWN])}"
    of_sample = {*wanted} if len(wanted) > 1 and not {*wanted} & {*target.columns} else set()
    if of_sample and (strange := sorted(names - of_sample)):
        raise DataError(
            f"{place}: the sample submission has no column for the class {strange[0]!r}.",
            "Give the sample submission of this table: --set sample_submission=FILE, or none.",
        )
    if twice := sorted(name for name in names if f"{name}.0" in names):
        raise DataError(
            f"{place}: {twice[0]!r} and '{twice[0]}.0' are one number.",
            "Write it in one way.",
        )
    plain = {plain_name(name): name for name in names}
    if alike := sorted(name for name in names if plain[plain_name(name)] != name):
        other = plain[plain_name(alike[0])]
        raise DataError(
            f"{place}: {alike[0]!a} and {other!a} are one name.", "Write it in one way."
        )
    hint = "Name the column of the classes with --set columns=NAME."
    if len(names) == 1:
        raise DataError(f"{table.path}: every {target.columns[0]} is {min(names)!r}.", hint)
    if len(names) > max(MOST_SINGLE, len(table.rows) / 2):
        raise DataError(
            f"{table.path}: {len(names)} values of {target.columns[0]} for {len(table.rows)} rows"
            " are no classes.",
            f"{hint} To predict a number: --set target=number",
        )
    return tuple(numbers_first(names | of_sample))


def named_by(columns: Sequence[str], names: Collection[str]) -> tuple[str, ...]:
    """Which of `names` each column stands for, that may begin with the same letters as the others
    (Class_1); none: they are of something else."""
    for start in range(min(map(len, columns), default=0)):
        if start and (len(columns) == 1 or len({name[:start] for name in columns}) > 1):
            break
        if sorted(found := [name[start:] for name in columns]) == sorted(names):
            return tuple(found)
    return ()


def words_of(texts: Iterable[str]) -> set[str]:
    return {word for text in texts for word in text.split()}


def _labels_in(
    texts: set[str], asked: Kind | None, wanted: Collection[str]
) -> tuple[str, ...]:  # fmt: skip
    """The labels of a column whose fields hold several (`scab rust`): that are asked for, are the
    sample's columns, or occur alone too and are fewer than the fields' texts; none: others."""
    several = [words for text in texts if len(words := text.split()) > 1]
    labels = words_of(texts)
    if not several or texts <= {*wanted} or asked not in (None, "labels"):
        return ()
    if labels <= {*wanted}:
        return tuple(numbers_first(wanted))
    alone = sum(all(word in texts for word in words) for words in several)
    looks_so = len(labels) < len(texts) and alone * 2 >= len(several)
    return tuple(numbers_first(labels)) if asked == "labels" or looks_so else ()


def _require_none_missing(table: Table, name: str, present: Collection[str]) -> None:
    """Raises DataError where all values but a mark of missing ones are numbers."""
    texts = {text for text in present if as_number(text) is None}
    if 0 < len(texts) < len(present) and all(text.lower() in MISSING for text in texts):
        row = next(row for row, text in enumerate(_filled(table, name)) if text in texts)
        raise DataError(
            f"{table.where(row)}: {name} is {_filled(table, name)[row]!r} among numbers.",
            "Fill it in, or remove the row; to learn it as a class of its own: --set target=class",
        )


def require_known(found: Collection[str], known: Sequence[str], place: str) -> None:
    """Raises DataError for classes that a model does not know."""
    if new := sorted({*found} - {*known} - {""}):
        raise DataError(
            f"{place}: class {new[0]!r} is not one of the model's {len(known)}"
            f" ({', '.join(known[:SHOWN])}, ...).",
            "Use the classes that the run was trained on, or train a new run (--results-dir).",
        )


def _require_fit(
    table: Table, target: Target, present: Sequence[set[str]], wanted: Sequence[str],
    sample: Table | None,
) -> None:  # fmt: skip
    """Raises DataError for values that are not of the kind, and for a sample of another kind."""
    name, kind = target.columns[0], target.kind
    if kind in ("class", "score") and len(target.columns) > 1 and not target.is_one_hot:
        raise DataError(
            f"target {kind}: one column is a {kind}, not {', '.join(target.columns[:SHOWN])}.",
            "Name it: --set columns=NAME",
        )
    if kind != "class":
        target.values(table)
    if kind == "class" and target.why.endswith("target") and _has_parts(present[0]):
        numbers = len(present[0])
        if numbers > MOST_GRADES:
            raise DataError(
                f"{table.path}: {numbers} numbers in {name} ({', '.join(sorted(present[0])[:3])},"
                " ...) are no classes.",
                "To predict them: --set target=number",
            )
    for column, values in zip(target.columns, present, strict=True):
        if kind in ("number", "score") and len(values) == 1:
            raise DataError(
                f"{table.path}: every {column} is {min(values)}.",
                "Name another: --set columns=NAME",
            )
        if kind == "number":
            _require_resolved(table, column)
    if sample is None or kind == "class" or not (name in wanted or len(wanted) == 1):
        return
    asked = name if name in wanted else wanted[0]
    texts = {text for text in sample.column(asked) if as_number(text) is None and text.strip()}
    if texts:
        raise DataError(
            f"{sample.path.name} has {min(texts)!r} in {asked}; the table's values there are"
            f" {'0 and 1' if kind == 'labels' else 'numbers'}.",
            "Give the sample submission of this table: --set sample_submission=FILE, or none.",
        )


def _require_resolved(table: Table, name: str) -> None:
    """Raises DataError for numbers that float32, which models compute in, does not tell apart."""
    numbers = np.array([as_number(text) for text in table.column(name)], np.float64)
    apart = float(np.spacing(np.float32(abs(numbers).max())))
    if numbers.std() < FEWEST_PARTS * apart:
        raise DataError(
            f"{table.path}: {name} deviates by {numbers.std():.3g} from {numbers.mean():.8g}, where"
            f" neighbouring numbers of float32 are {apart:.3g} apart.",
            f"Train on {name} less {numbers.mean():.3g}, and add that to the predictions.",
        )


def _filled(table: Table, name: str) -> list[str]:
    """A column without blanks around. Raises DataError for a row that has none."""
    texts = [value.strip() for value in table.column(name)]
    if "" in texts:
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


def _has_parts(values: Collection[str]) -> bool:
    """Whether they are numbers that are not all whole."""
    numbers = [as_number(value) for value in values]
    return None not in numbers and any(number and number % 1 for number in numbers)


def numbers_first(names: Iterable[str]) -> list[str]:
    """Classes: numbers (not "nan", which has no order) by their size, then the other names."""
    return sorted(names, key=lambda n: (0, float(n), n) if NUMBER.fullmatch(n) else (1, 0.0, n))
