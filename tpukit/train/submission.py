"""From raw predictions to a submission: averaged, decided, in the sample's columns and order."""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tpukit.errors import ConfigError, DataError
from tpukit.io.files import writing_errors
from tpukit.io.tables import Table, column_place, plain_name, read_table, write_csv
from tpukit.train.target import Target, as_number, named_by, words_of

DEFAULT_OUT = Path("submission.csv")
DIGITS = 10
"""Of a written prediction; those behind the point would leave none of 1e-9."""
NEUTRAL = ("frequencies", "uniform")
"""Kinds of rows for samples without a prediction."""
TRUTHS = {"true": 1.0, "false": 0.0}
"""Words of two classes, in small letters."""
SHOWN = 3
"""Names in a message."""


@dataclass(frozen=True)
class Predictions:
    """What a task's `predict` may return: the core averages, decides and writes it."""

    ids: Sequence[str]
    values: NDArray[Any]
    """(rows, `target.predicted`): probabilities, numbers or expected scores; a row of NaN has no
    prediction (a damaged image)."""
    target: Target
    id_column: str = "id"
    neutral: str = "frequencies"
    """What rows without a prediction get: frequencies (of the training rows), uniform, or a
    class."""
    probabilities: bool = False
    """Whether a submission without a sample has a column for each class."""
    notes: Sequence[str] = field(default=())
    """Lines for people."""


class Form(NamedTuple):
    """The columns of a submission beside the ids."""

    columns: tuple[str, ...]
    shown: tuple[str, ...] = ()
    """The predicted columns that they hold; none: the decided class."""
    whole: bool = False
    """Whether values are decided: labels 0 or 1, whole scores and numbers."""
    placeholder: str | None = None
    """A value of the sample's column of classes, where it holds none of them."""
    ranked: int = 1
    """Classes in a field, the likeliest first, where the sample has several (`map@5`)."""
    spelled: Sequence[str] = ()
    """The classes as the sample writes them."""
    joined: bool = False
    """Whether the column holds the labels of a row, with blanks between."""


def require_names(sample: Table) -> None:
    """Raises DataError for a sample submission one of whose columns has no name."""
    if "" in map(plain_name, sample.columns):
        raise DataError(
            f"{sample.path} has a column without a name, as pandas writes its index.",
            "Remove it: a sample has the ids and what is to be predicted.",
        )


def form_of(
    target: Target, sample: Table | None, id_column: str, *, probabilities: bool = False,
    cut: bool = False, raw: bool = False,
) -> Form:  # fmt: skip
    """The form that a sample submission asks for; without one the target's columns, or a column a
    class.

    cut: whether there are cut points, as the run's metric is one of decisions; raw: whether it is
    one of probabilities or numbers.

    Raises DataError for a sample that asks for something else than was learned.
    """
    if sample is None:
        if target.kind == "class":
            shown = target.classes if probabilities else ()
            columns = ("label",) if target.is_one_hot else target.columns[:1]
            return Form(shown or columns, shown)
        return Form(target.predicted, target.predicted, target.kind == "score" and not raw)
    columns = tuple(n for n in map(plain_name, sample.columns) if n != plain_name(id_column))
    require_names(sample)
    for name in (name for name in columns if name in target.others):
        raise DataError(
            f"{sample.path} asks for {name}; the run has learned {', '.join(target.of_table)}.",
            f"Train on that column: --set columns={name}, or leave --sample-submission out.",
        )
    texts = {value.strip() for name in columns for value in sample.column(name)} - {""}
    if target.kind == "class":
        return _form_of_classes(target, sample, columns, texts, probabilities, raw)
    if target.joined and len(columns) == 1:
        return Form(columns, joined=True)
    # Of one column the name may be another (Predicted).
    alone = len(columns) == len(target.predicted) == 1
    shown = target.predicted if alone else named_by(columns, target.predicted)
    if len(shown) != len(target.predicted):
        raise DataError(
            f"{sample.path}: beside the id it has the columns {', '.join(columns) or 'none'}; the"
            f" run has learned {', '.join(target.predicted)}.",
            "Leave --sample-submission out: the ids are the test file's.",
        )
    numbers = [as_number(text) for text in texts]
    if None in numbers:
        raise DataError(f"{sample.path}: {min(texts)!r} is not a number, which the run predicts.")
    # A sample of one constant shows nothing about labels: without cuts probabilities rank as well.
    is_whole = all(number is not None and number % 1 == 0 for number in numbers)
    decides = {"score": not raw, "labels": cut or len(texts) == 2}.get(target.kind, False)
    return Form(columns, shown, is_whole and decides and not probabilities)


def _form_of_classes(
    target: Target, sample: Table, columns: tuple[str, ...], texts: set[str], probabilities: bool,
    raw: bool,
) -> Form:  # fmt: skip
    """Of two classes one column asks for the probability of one, by its name, values that are not
    whole, one number alone where the metric is one of probabilities, or the settings."""
    classes = target.classes
    if len(named := named_by(columns, classes)) == len(classes):
        return Form(columns, named)
    if len(columns) == 1 and len(classes) == 2:
        if columns[0] in classes:
            return Form(columns, columns)
        numbers = [as_number(text) for text in texts]
        is_constant = len(texts) == 1 and None not in numbers
        if probabilities or any((n or 0) % 1 for n in numbers) or (raw and is_constant):
            return Form(columns, classes[1:])
    if len(columns) == 1 and not probabilities:
        if (spelled := _spelled(classes, texts)) is not None:
            return Form(columns, spelled=spelled)
        most, words = max((len(text.split()) for text in texts), default=0), words_of(texts)
        # Some may be none of the training's (new_whale); classes of several words are not ranked.
        known, are_words = len(words & {*classes}), not any(len(n.split()) > 1 for n in classes)
        if known and (known == len(words) or (most > 1 and known * 2 >= len(words) and are_words)):
            return Form(columns, ranked=most, spelled=classes)
        first = sample.column(columns[0])[0] if sample.rows else ""
        return Form(columns, placeholder=first, spelled=classes)
    raise DataError(
        f"{sample.path}: beside the id it has the columns {', '.join(columns) or 'none'}, neither"
        f" one of classes nor one for each of the {len(classes)} classes"
        f" ({', '.join(classes[:SHOWN])}, ...).",
        "Leave --sample-submission out: the ids are test.csv's, --set probabilities=true writes "
        "the probabilities.",
    )


def _spelled(classes: Sequence[str], texts: Collection[str]) -> Sequence[str] | None:
    """Classes as a sample writes them: 1 for 1.0 or True; None where its values are no classes."""
    if not texts or {*texts} & {*classes}:
        return classes
    of_class, asked = ([TRUTHS.get(t.lower(), as_number(t)) for t in each] for each in
                       (classes, texts))  # fmt: skip
    numbers = [number for number in of_class if number is not None]
    mixed = len({name.lower() in TRUTHS for name in classes}) > 1
    if mixed or len({*numbers}) < len(classes) or not {*asked} <= {*numbers}:
        return None
    forms: Sequence[Callable[[float], str]] = (
        lambda n: str(int(n)) if n % 1 == 0 else str(n), str,
        lambda n: str(bool(n)), lambda n: str(bool(n)).lower(),
    )  # fmt: skip
    for form in forms if {*numbers} <= {0.0, 1.0} else forms[:2]:
        if {*texts} <= {form(number) for number in numbers}:
            return [form(number) for number in numbers]
    return None


def mean_of(parts: Sequence[Predictions], weights: Sequence[float] | None = None) -> Predictions:
    """The weighted mean of several runs' predictions of the same rows; one run's as it is.

    Raises ConfigError where they do not predict the same of the same rows.
    """
    first = parts[0]
    for other in parts[1:]:
        if [*other.ids] != [*first.ids]:
            raise ConfigError(
                "several --run: they predict other rows.", "Average runs of one test set."
            )
        require_same(first.target, other.target)
    if len(parts) == 1:
        return first
    shares = np.array(weights or [1.0] * len(parts))
    weighted = [p.values.astype(np.float64) * w for p, w in zip(parts, shares, strict=True)]
    total: Any = sum(weighted)
    return Predictions(
        first.ids, total / shares.sum(), first.target, first.id_column, first.neutral,
        first.probabilities, [note for part in parts for note in part.notes],
    )  # fmt: skip


def require_same(one: Target, other: Target) -> None:
    """Raises ConfigError for two targets that cannot be averaged."""
    these, those = ([each.kind, *each.predicted] for each in (one, other))
    if these == those:
        return
    differ = [(a, b) for a, b in zip(those, these, strict=False) if a != b]
    a, b = differ[0] if differ else (f"{len(those)} columns", f"{len(these)}")
    raise ConfigError(
        f"several --run: one predicts {a!r} instead of {b!r}.",
        "Average runs of the same classes or columns.",
    )


# -- decisions -----------------------------------------------------------------------------------
def neutral_row(target: Target, wanted: str) -> NDArray[np.float64]:
    """(predicted,) what stands for a row without a prediction.

    Raises ConfigError where `wanted` is neither a kind of row nor a class.
    """
    if wanted not in (*NEUTRAL, *target.classes) or (
        wanted in target.classes and target.kind != "class"
    ):
        of = f" nor a class ({', '.join(target.classes[:SHOWN])}, ...)"
        raise ConfigError(f"damaged_row {wanted!r} is neither {' nor '.join(NEUTRAL)}{of}.")
    if target.kind != "class":
        count = len(target.predicted)
        fallback = (0.5,) * count if target.kind == "labels" else (0.0,) * count
        return np.array(target.mean or fallback)
    if wanted in target.classes:
        return np.array([float(name == wanted) for name in target.classes])
    counts = target.counts if wanted == "frequencies" else ()
    row = np.array(counts or (1,) * len(target.classes), np.float64)
    return np.asarray(row / row.sum())


def decided(
    target: Target, values: NDArray[Any], cuts: Sequence[float] | None = None
) -> NDArray[np.float64]:
    """Whole scores or labels of raw predictions (rows, predicted).

    cuts: between neighbouring scores, or a threshold for each label (default: the middle).
    """
    if target.kind == "labels":
        return np.asarray(values >= np.array(cuts or 0.5), np.float64)
    if target.kind == "score":
        grades = target.grades
        between = np.array(cuts) if cuts else (grades[1:] + grades[:-1]) / 2
        return np.asarray(grades[np.searchsorted(between, values, side="right")])
    return np.asarray(np.rint(values))


def scored_rows(
    target: Target, ids: Sequence[str], values: NDArray[Any], predicted: NDArray[Any],
    further: Mapping[str, Sequence[object]] | None = None,
) -> Iterator[Sequence[object]]:  # fmt: skip
    """A header and a row for each sample: its id, what is true and all that is predicted."""
    is_class, more = target.kind == "class", dict(further or {})
    columns = (", ".join(target.columns) if target.is_one_hot else target.columns[0],)
    names = columns if is_class else target.columns
    # Targets may have these names too.
    own, decided_name = (name + "_" * (name in names) for name in ("id", "predicted"))
    names = (*names, *((decided_name,) if is_class else ()))
    yield [own, *more, *names, *(f"predicted_{name}" for name in target.predicted)]
    for place, (name, row) in enumerate(zip(ids, predicted, strict=True)):
        truth = values[place].reshape(-1).tolist()
        if is_class:
            truth = [target.classes[int(truth[0])], target.classes[int(row.argmax())]]
        yield [name, *(each[place] for each in more.values()), *truth, *row.astype(float).tolist()]


# -- writing -------------------------------------------------------------------------------------
def in_sample_order(
    found: Predictions, sample: Table | None, id_column: str
) -> tuple[list[str], NDArray[Any]]:
    """Ids and predictions in the order of a sample; an id is written as the sample spells it.

    Raises DataError naming ids that only one of the two has.
    """
    if sample is None:
        return [*found.ids], found.values
    ids = sample.column(id_column)
    require_match(sample.columns, found.ids, sample, id_column)
    by_id = rows_by_id(found.ids)
    return ids, found.values[[by_id[plain_name(name)].popleft() for name in ids]]


def rows_by_id(ids: Sequence[str]) -> dict[str, deque[int]]:
    """Id as ids are compared -> its rows, in their order."""
    by_id: dict[str, deque[int]] = defaultdict(deque)
    for row, name in enumerate(ids):
        by_id[plain_name(name)].append(row)
    return by_id


def write_submission(
    found: Predictions, out: Path, sample: Table | None, log: Callable[[str], None],
    cuts: Sequence[float] | None = None, *, raw: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Writes the rows; the JSON fields of `predict`. cuts, raw: see `form_of`."""
    target, key = found.target, found.id_column
    if sample is not None and column_place(sample.columns, key) is None:
        key = plain_name(sample.columns[0])
    form = form_of(
        target, sample, key, probabilities=found.probabilities, cut=cuts is not None, raw=raw
    )
    ids, values = in_sample_order(found, sample, key)
    missing = ~np.isfinite(values).all(1)
    values = np.where(missing[:, None], neutral_row(target, found.neutral), values)
    if form.shown:
        places = [target.predicted.index(name) for name in form.shown]
        if form.whole:
            values = decided(target, values, cuts)
        texts = [[f"{row[i]:.{DIGITS}g}" for i in places] for row in values]
    elif form.joined:
        chosen = decided(target, values, cuts) > 0
        none = ~chosen.any(1)
        chosen[none, values[none].argmax(1)] = True
        texts = [[" ".join(compress(target.classes, row))] for row in chosen]
    else:
        best = values.argmax(1)[:, None]
        if form.ranked > 1:
            best = np.argsort(-values, axis=1, kind="stable")[:, : form.ranked]
        spelled = form.spelled or target.classes
        texts = [[" ".join(spelled[place] for place in row)] for row in best]
    # The ids may be another column than the first.
    names = [*map(plain_name, sample.columns)] if sample else [key]
    place = names.index(plain_name(key)) if sample else 0
    rows = [[*row[:place], each, *row[place:]] for each, row in
            zip([key, *ids], [form.columns, *texts], strict=True)]  # fmt: skip
    with writing_errors(out.parent):
        write_csv(out, rows)
    for note in dict.fromkeys(found.notes):
        log(note)
    log(f"{len(ids)} rows in {out}: {what_is_written(target, form, cuts)}")
    damaged = list(compress(ids, missing))
    if damaged:
        wanted = found.neutral
        if wanted == "frequencies" and target.kind == "class" and not target.counts:
            wanted = "uniform, as this run keeps no frequencies"
        more = [f"and {len(damaged) - 10} more"] if len(damaged) > 10 else []
        log(
            f"Warning: {len(damaged)} of {len(ids)} images cannot be read and have a neutral row"
            f" (damaged_row: {wanted}): {', '.join([*damaged[:10], *more])}"
        )
    return {"rows": len(ids), "path": str(out), "damaged": damaged}


def what_is_written(target: Target, form: Form, cuts: Sequence[float] | None = None) -> str:
    """The values of a submission, in words."""
    name = form.columns[0]
    if target.kind in ("number", "score"):
        how = ""
        if form.whole:
            how = f", cut at {', '.join(f'{c:.3g}' for c in cuts)}" if cuts else ", rounded"
        return f"{', '.join(form.columns[:SHOWN])}: the predicted {target.kind}{how}"
    if target.kind == "labels":
        joined = f"{name} is the labels that are likely enough, at least the likeliest"
        each = "each label, 0 or 1" if form.whole else "each label's probability"
        return joined if form.joined else each
    if len(form.shown) == 1:
        return f"{name} is the probability of class {form.shown[0]!r}"
    if form.placeholder is not None:
        first = ", ".join(target.classes[:SHOWN])
        return f"{name} is the class ({first}, ...); the sample has {form.placeholder!r}, no class"
    if form.ranked > 1:
        return f"{name} is the {form.ranked} likeliest classes, the first the best"
    return "each class's probability" if form.shown else f"{name} is the class"


# -- a file that a task wrote --------------------------------------------------------------------
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
    require_match(made.columns, ids[0], sample, key, written)
    by_id = rows_by_id(ids[0])
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


def require_match(
    columns: Sequence[str], ids: Sequence[str], sample: Table, key: str | None = None,
    written: Path | None = None,
) -> None:  # fmt: skip
    """Raises DataError where a sample has other columns or, in `key` or its first one, other ids
    than what is, or was, written."""
    given = sample.column(key or sample.columns[0])
    differences = _differences("column", columns, sample.columns)
    differences += _differences("id", ids, given)
    if differences:
        subject = f"{written} does" if written else "The submission would"
        raise DataError(
            f"{subject} not match {sample.path}: {'; '.join(differences)}.",
            "The file stays as the task wrote it. Predict what the sample names, or leave"
            " --sample-submission out." if written
            else "Give the sample submission and the test file of the same data.",
        )  # fmt: skip


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
