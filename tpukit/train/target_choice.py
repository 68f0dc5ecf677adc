"""Which columns of a table are learned, and as what: see `learned_target`.

The sample submission decides, else what the test table lacks, then names and values. What nothing
decides, and what does not fit, is an error before training: a wrong column trains without a sign.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from tpukit.errors import DataError
from tpukit.io.tables import Table, column_place, plain_name
from tpukit.train.target import (
    MISSING,
    SHOWN,
    ZERO_OR_ONE,
    Kind,
    Target,
    as_number,
    filled,
    is_missing,
    named_by,
    numbers_first,
    words_of,
)

FOLD_NAMES = ("fold", "folds", "kfold")
"""Columns of a table that look like folds."""
LABEL_NAMES = ("label", "labels", "class", "class_name", "category", "target", "diagnosis")
"""Columns of a table that look like classes, the likeliest first."""
SCORE_NAME = re.compile(r"(score|grade|rating|level|severity|stars|isup)", re.IGNORECASE)
"""Names of columns whose whole numbers are in an order that counts."""
CLASS_NAME = re.compile(r"(id|label|class|code|type|category)s?$", re.IGNORECASE)
"""Names of columns whose whole numbers stand for names."""
MOST_GRADES = 10
"""Different numbers that may be classes although they are not whole, such as 1.5 and 2.5."""
MOST_CODES = 30
"""Different whole numbers that are classes although they are not 0 to n - 1."""
MOST_SCORES = 100
"""Different whole numbers that may be a score."""
MOST_SINGLE = 10
"""Classes that may have a row each; numbers and texts have more."""
FEWEST_PARTS = 100
"""Float32's distances between two numbers, to a column's standard deviation."""


def learned_target(
    table: Table, ids: str, named: Sequence[str] | None = None, *, kind: Kind | None = None,
    apart: Collection[str | None] = (), sample: Table | None = None, tests: Collection[str] = (),
) -> Target:  # fmt: skip
    """What a table's rows are labelled with.

    ids: the column of the ids; named, kind: the settings `columns` and `target`; apart: columns of
    folds, groups and features; tests: those of the test table, which are known when it is
    predicted.

    Raises DataError listing the columns where several are possible, and for what does not fit.
    """
    others = [name for name in map(plain_name, table.columns) if name and name != ids]
    others = [name for name in others if not name.startswith("Unnamed: ")]
    others = [n for n in others if n not in apart and n.lower() not in FOLD_NAMES]
    values = {name: {*map(str.strip, table.column(name))} for name in others}
    tested = {*map(plain_name, tests)}
    left = {name: values[name] for name in others if name not in tested} or values
    wanted = _asked_for(table, sample, ids, left) if sample else []
    found = _named(table, ids, named, wanted, sample)
    found = found or _in_sample(values, wanted, sample) or _of_columns(left, wanted, sample)
    found = found or _likely(left, len(table.rows), sample)
    if found is None:
        raise DataError(
            f"{table.path}: which column is to be predicted is not clear:"
            f" {', '.join(others) or 'there is none beside the ids'}.",
            "Name it: --set columns=NAME, or put sample_submission.csv beside the table.",
        )
    columns, why = tuple(found[0]), found[1]
    present = [{*map(str.strip, table.column(name))} for name in columns]
    if len(columns) > 1:
        present = [{text for text in texts if not is_missing(text)} for texts in present]
    found_kind, one_hot = _kind(table, columns, present, wanted, sample)
    if kind is None and found_kind == "class" and not one_hot:
        _require_none_missing(table, columns[0], present[0])
    if kind is not None:
        one_hot, why = one_hot and kind == "class", f"{why}, target"
    beside = tuple(name for name in map(plain_name, table.columns) if name not in columns)
    joined = _labels_in(present[0], kind, wanted) if len(columns) == 1 else ()
    kind = kind or found_kind
    target = Target(kind, columns, (), why, beside)
    for name in () if target.allows_gaps else columns:
        filled(table, name)
    if joined:
        return Target("labels", joined, joined, why, beside, joined=columns[0])
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
        row = next(row for row, text in enumerate(filled(table, name)) if text in texts)
        raise DataError(
            f"{table.where(row)}: {name} is {filled(table, name)[row]!r} among numbers.",
            "Fill it in, or remove the row; to learn it as a class of its own: --set target=class",
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
        if kind in ("number", "score") and len(values) < 2:
            raise DataError(
                f"{table.path}: every {column} is {min(values, default='missing')}.",
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
    found = map(as_number, table.column(name))
    numbers = np.array([number for number in found if number is not None])
    apart = float(np.spacing(np.float32(abs(numbers).max())))
    if numbers.std() < FEWEST_PARTS * apart:
        raise DataError(
            f"{table.path}: {name} deviates by {numbers.std():.3g} from {numbers.mean():.8g}, where"
            f" neighbouring numbers of float32 are {apart:.3g} apart.",
            f"Train on {name} less {numbers.mean():.3g}, and add that to the predictions.",
        )


def _has_parts(values: Collection[str]) -> bool:
    """Whether they are numbers that are not all whole."""
    numbers = [as_number(value) for value in values]
    return None not in numbers and any(number and number % 1 for number in numbers)
