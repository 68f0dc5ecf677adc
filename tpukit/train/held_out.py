"""Out-of-fold predictions: of each fold the samples that it was validated on, and all together."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tpukit.errors import DataError, UsageError
from tpukit.hardware.backend import Backend, Batch
from tpukit.io.files import write_file
from tpukit.io.tables import read_table, write_csv
from tpukit.train.evaluation import IN_PROCESS, Rows, all_batches, rows_of_data, rows_on_host
from tpukit.train.metric_names import LARGEST, LEAST, RANKED, MetricName, parse_metrics
from tpukit.train.metrics import ROWS, measured, one_row_each
from tpukit.train.submission import decided, scored_rows
from tpukit.train.target import Target
from tpukit.train.task import Task, overrides

FILE, TARGET_FILE = "held_out.csv", "held_out.json"
"""The rows of a fold, and what is predicted of them."""
ALL_FILE, SUMMARY_FILE = "out_of_fold.csv", "folds.json"
"""The rows of all folds, and what they say."""
DRAWS = 200
"""Resamples of an interval."""
KAPPAS, F1S = ("qwk", "quadratic_kappa", "kappa"), ("f1", "macro_f1", "micro_f1")
"""Metrics that cut points of scores, and thresholds of labels, are fitted to."""


class HeldOut(NamedTuple):
    """Predictions of samples that a model has not learned."""

    target: Target
    ids: list[str]
    values: NDArray[Any]
    predicted: NDArray[Any]
    """(samples, predicted); see `Target.predicted`."""


def write_held_out(task: Task, model: Any, backend: Backend, folder: Path) -> str | None:
    """Writes what a model predicts of its validation samples; why not, where it cannot. Every rank
    must call it."""
    import torch

    data = task.datasets()
    sets = data.validation_sets()
    if len(sets) != 1 or not overrides(task, "validation_rows"):
        return "it needs one validation set, and `validation_rows` with target and prediction"

    def forward(batch: Batch) -> Rows:
        with torch.no_grad(), backend.autocast():
            found = backend.call(model, task.validation_rows, batch)
        rows = rows_on_host(found, batch, task.validation_rows, backend)
        # Masked rows stay until the ids are known.
        return {**rows, "kept": rows["mask"], "mask": np.ones(len(rows["mask"]))}

    (valid,) = sets.values()
    rows = rows_of_data(
        task, valid, all_batches(task, valid, backend), backend, IN_PROCESS, forward
    )
    if not {*ROWS} <= rows.keys():
        return "`validation_rows` returns no target and prediction"
    rows = one_row_each(rows)
    if backend.is_main:
        kept = np.flatnonzero(rows["kept"] > 0)
        ids = [*data.ids] or [str(number) for number in range(len(valid))]
        values, predicted = (rows[name][kept] for name in ROWS)
        target = task.predicts or _plain_target(values, predicted)
        predicted = predicted.reshape(len(kept), -1)
        lines = scored_rows(target, [ids[row] for row in kept], values, predicted)
        write_file(folder / TARGET_FILE, target.to_json())
        write_csv(folder / FILE, lines)
    backend.all_gather_objects(None)
    return None


def _plain_target(values: NDArray[Any], predicted: NDArray[Any]) -> Target:
    """What rows of a task that does not say it predict."""
    if predicted.ndim == values.ndim + 1 == 2:
        return Target("class", ("target",), tuple(map(str, range(predicted.shape[1]))))
    count = 1 if values.ndim == 1 else values.shape[1]
    names = ("target",) if count == 1 else tuple(f"target_{i}" for i in range(count))
    return Target("number", names)


def read_held_out(folder: Path) -> HeldOut:
    """A fold's rows. Raises DataError for a file that is not one."""
    target, table = Target.from_json((folder / TARGET_FILE).read_bytes()), read_table(folder / FILE)
    names = [f"predicted_{name}" for name in target.predicted]
    predicted = np.array([table.column(name) for name in names], np.float64).T
    if target.kind == "class":
        texts = table.column(table.columns[1])
        values = np.array([target.classes.index(text) for text in texts])
    else:
        values = np.array([table.column(name) for name in target.columns], np.float64).T
        values = values[:, 0] if target.kind == "score" else values
    return HeldOut(target, table.column(table.columns[0]), values, predicted)


def together(parts: Sequence[HeldOut]) -> HeldOut:
    """The rows of several folds. Raises DataError for folds that predict something else."""
    first = parts[0]
    for other in parts:
        if (other.target.kind, other.target.predicted) != (
            first.target.kind,
            first.target.predicted,
        ):
            raise DataError("the folds predict different columns or classes.", "Train them alike.")
    ids = [name for part in parts for name in part.ids]
    values, predicted = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("values", "predicted")
    )
    return HeldOut(first.target, ids, values, predicted)


def scores(found: HeldOut, metrics: Sequence[MetricName]) -> dict[str, float]:
    """The metrics of rows; of scores those of decisions as `predict` writes them without cuts."""
    is_class = found.target.kind == "class"
    predicted = found.predicted if is_class else found.predicted.reshape(found.values.shape)
    rows = found.values, predicted, found.target
    return {metric.name: measured(metric, *rows) for metric in metrics}


def interval(found: HeldOut, metric: MetricName) -> list[float] | None:
    """The 95 % interval of a metric over samples (percentiles of resamples); None where few of them
    define it."""
    rng, count = np.random.default_rng(0), len(found.ids)
    drawn = []
    for _ in range(DRAWS):
        rows = rng.integers(count, size=count)
        part = found._replace(values=found.values[rows], predicted=found.predicted[rows])
        with suppress(Exception):  # a user's function may be defined for all rows alone
            drawn.append(scores(part, [metric])[metric.name])
    known = [value for value in drawn if not math.isnan(value)]
    if len(known) < DRAWS / 2:
        return None
    return [float(end) for end in np.quantile(known, [0.025, 0.975])]


def fitted_cuts(found: HeldOut, metric: MetricName) -> list[float] | None:
    """Cut points between scores, or a threshold for each label, that the metric is best with; None
    where it does not depend on them."""
    target = found.target
    if target.kind == "labels" and metric.name in F1S:
        pairs = zip(found.values.T, found.predicted.T, strict=True)
        return [_threshold(values, predicted) for values, predicted in pairs]
    if target.kind != "score" or metric.name not in KAPPAS:
        return None
    from scipy.optimize import minimize

    grades = target.grades

    def worse(cuts: NDArray[np.float64]) -> float:
        if (np.diff(cuts) < 0).any():
            return 1.0
        whole = decided(target, found.predicted, cuts.tolist())
        return -scores(found._replace(predicted=whole), [metric])[metric.name]

    middle = (grades[1:] + grades[:-1]) / 2
    # Where all predictions lie between two scores, a small step from the middle changes nothing.
    shares = [float((found.values <= grade).mean()) for grade in grades[:-1]]
    starts = [middle, np.quantile(found.predicted, shares)]
    options = {"maxfev": 100 * len(middle)}
    tried = [
        *starts,
        *(minimize(worse, s, method="Nelder-Mead", options=options).x for s in starts),
    ]
    return [float(cut) for cut in min(tried, key=worse)]


def blended(
    runs: Sequence[Sequence[Path]], shares: Sequence[float], name: str
) -> tuple[float | None, list[float] | None, float | None]:
    """Of the weighted mean of what several runs' folds predict of the same samples: the metric, the
    cut points fitted to it, and the metric with these; None where the samples are not the same, or
    the metric is a user's function."""
    if not (name in LARGEST or name in LEAST or RANKED.fullmatch(name)):
        return None, None, None
    wholes = [together([read_held_out(fold) for fold in folds]) for folds in runs]
    first, total = wholes[0], np.zeros_like(wholes[0].predicted)
    for whole, share in zip(wholes, shares, strict=True):
        rows = {sample: row for row, sample in enumerate(whole.ids)}
        same = rows.keys() == {*first.ids} and len(rows) == len(whole.ids) == len(first.ids)
        if not same or whole.target.predicted != first.target.predicted:
            return None, None, None
        total += share / sum(shares) * whole.predicted[[rows[sample] for sample in first.ids]]
    mean, (metric,) = first._replace(predicted=total), parse_metrics(name)
    score = scores(mean, [metric])[name]
    if (cuts := fitted_cuts(mean, metric)) is None:
        return score, None, None
    cut = mean._replace(predicted=decided(mean.target, total, cuts))
    return score, cuts, scores(cut, [metric])[name]


def _threshold(values: NDArray[Any], predicted: NDArray[Any]) -> float:
    """The probability from which on a label's F1 is best."""
    from sklearn.metrics import precision_recall_curve

    if not 0 < values.sum() < len(values):
        return 0.5
    precision, recall, places = precision_recall_curve(values, predicted)
    f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-12)
    return float(places[int(f1[:-1].argmax())])


def summarise(
    folder: Path, folds: Mapping[str, Path], metrics: Callable[[Target], Sequence[MetricName]]
) -> dict[str, Any]:
    """Writes the rows of all folds that are finished, and what they say; the latter."""
    parts = {name: read_held_out(path) for name, path in folds.items()}
    if not parts:
        raise UsageError("no fold is finished.", "Train on with the same command.")
    whole = together([*parts.values()])
    asked = metrics(whole.target)
    by_fold = {name: scores(part, asked) for name, part in parts.items()}
    summary: dict[str, Any] = {"folds": by_fold, "metrics": {}, "rows": len(whole.ids)}
    for metric in asked:
        values = [found[metric.name] for found in by_fold.values()]
        summary["metrics"][metric.name] = {
            "mean": float(np.mean(values)),
            "deviation": float(np.std(values, ddof=1)) if len(values) > 1 else None,
            "together": scores(whole, [metric])[metric.name],
            "interval": interval(whole, metric),
        }
    if asked and (cuts := fitted_cuts(whole, asked[0])) is not None:
        whole_cut = whole._replace(predicted=decided(whole.target, whole.predicted, cuts))
        summary |= {"cuts": cuts, "with_cuts": scores(whole_cut, asked[:1])[asked[0].name]}
    numbers = [name for name, part in parts.items() for _ in part.ids]
    lines = scored_rows(whole.target, whole.ids, whole.values, whole.predicted, {"fold": numbers})
    write_csv(folder / ALL_FILE, lines)
    write_file(folder / SUMMARY_FILE, json.dumps(summary, indent=1).encode())
    return summary
