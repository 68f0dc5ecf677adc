"""Metrics by name, as scikit-learn defines them, from targets and predictions of any task.

| what is predicted | targets | predictions |
|---|---|---|
| one class | (samples,) whole numbers | (samples, classes) probabilities |
| several labels | (samples, labels) 0 or 1 | (samples, labels) probabilities |
| numbers, ordered scores | (samples,) or (samples, columns) | the same shape |

Missing targets (NaN) are left out. Of several columns a metric is the mean over those that define
it, unless it looks at whole rows. Where a prediction is not finite, or nothing is defined, NaN.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tpukit.errors import TpukitError, UsageError
from tpukit.train.metric_names import RANKED, MetricName
from tpukit.train.submission import decided
from tpukit.train.target import Target
from tpukit.train.user_code import import_user_file, import_user_module

Array = NDArray[Any]
ROWS = ("target", "prediction")
"""What `Task.validation_rows` returns for metrics by name."""
SAMPLE = "sample"
"""Number of the sample that a row is a view of; the predictions of its rows are averaged."""
WHOLE_ROWS = ("accuracy", "micro_f1", "weighted_f1", "lrap")
"""Metrics that look at all columns of a row; so do those of a ranking."""
DECISIONS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "accuracy": ("accuracy_score", {}),
    "balanced_accuracy": ("balanced_accuracy_score", {}),
    **{f"{prefix}{name}": (f"{name}_score", {"average": average, "zero_division": 0.0})
       for name in ("f1", "precision", "recall")
       for prefix, average in (("", "binary"), ("macro_", "macro"), ("micro_", "micro"),
                               ("weighted_", "weighted"))},
    "mcc": ("matthews_corrcoef", {}),
    "kappa": ("cohen_kappa_score", {}),
    "qwk": ("cohen_kappa_score", {"weights": "quadratic"}),
    "quadratic_kappa": ("cohen_kappa_score", {"weights": "quadratic"}),
}  # fmt: skip
"""Metrics of what is decided: scikit-learn's function and its arguments."""
PROBABILITIES = {
    "log_loss": "log_loss", "auc": "roc_auc_score", "roc_auc": "roc_auc_score",
    "average_precision": "average_precision_score",
    "lrap": "label_ranking_average_precision_score",
}  # fmt: skip
"""Metrics of probabilities."""
NUMBERS = {
    "rmse": "mean_squared_error", "mse": "mean_squared_error", "mae": "mean_absolute_error",
    "median_ae": "median_absolute_error", "rmsle": "mean_squared_log_error",
    "mape": "mean_absolute_percentage_error", "r2": "r2_score",
}  # fmt: skip
"""Metrics of numbers; the root of those whose name begins with r and an m."""
CORRELATIONS = {"pearson": "pearsonr", "spearman": "spearmanr"}
"""Functions of scipy."""


def is_of_values(names: Sequence[MetricName]) -> bool:
    """Whether the first of a run's metrics is of probabilities or numbers, not of decisions."""
    return bool(names) and names[0].name in {*PROBABILITIES, *NUMBERS, *CORRELATIONS}


def named_metrics(
    names: Sequence[MetricName], rows: Mapping[str, Array], target: Target | None = None
) -> dict[str, float]:
    """The metrics of these rows (`ROWS`). Raises UsageError for rows that a metric cannot take."""
    for row in ROWS:
        if names and row not in rows:
            raise UsageError(
                f"--metric {names[0].name} needs {row!r} of each validation sample.",
                'Return {"target": ..., "prediction": ...} from `validation_rows`: labels and'
                " probabilities, or numbers.",
            )
    rows = one_row_each(rows)
    true, predicted = ROWS
    return {each.name: measured(each, rows[true], rows[predicted], target) for each in names}


def metrics_of_first_rows(
    names: Sequence[MetricName], rows: Mapping[str, Array], target: Target | None = None
) -> dict[str, float]:
    """`named_metrics`; NaN where a user's function raises and these rows lack a class, as the first
    of folders of classes do."""
    try:
        return named_metrics(names, rows, target)
    except TpukitError:
        raise
    except Exception:
        true = rows[ROWS[0]].reshape(len(rows[ROWS[0]]), -1)
        needed = len(target.classes) if target is not None and target.kind == "class" else 2
        if all(len(np.unique(column)) >= needed for column in true.T):
            raise
        return {each.name: math.nan for each in names}


def one_row_each(rows: Mapping[str, Array]) -> dict[str, Array]:
    """The rows with the mean prediction of each sample in place of those of its views."""
    if SAMPLE not in rows:
        return dict(rows)
    first = np.unique(rows[SAMPLE], return_index=True)[1]
    _, predicted = ROWS
    mean = mean_by_sample(rows[SAMPLE], rows[predicted])
    return {**{name: values[first] for name, values in rows.items()}, predicted: mean}


def mean_by_sample(samples: Array, predictions: Array) -> Array:
    """The mean prediction of each sample, of which several rows are views (windows of a text).

    samples: (rows,) numbers, whose order is that of the result.
    """
    names, places = np.unique(samples, return_inverse=True)
    total = np.zeros((len(names), *predictions.shape[1:]), np.float64)
    np.add.at(total, places, predictions)
    counts = np.bincount(places).reshape(-1, *[1] * (predictions.ndim - 1))
    return total / counts


def measured(
    metric: MetricName, targets: Array, predictions: Array, target: Target | None = None
) -> float:
    """One metric; NaN where these rows do not define it.

    target: of scores those of decisions are of the nearest score, as `predict` writes it.
    """
    if metric.place is not None:
        return float(_own_function(metric)(targets, predictions))
    name, one_class = metric.name, predictions.ndim == targets.ndim + 1 == 2
    if len(targets) != len(predictions) or not (one_class or targets.shape == predictions.shape):
        raise UsageError(
            f"--metric {name}: targets {targets.shape}, predictions {predictions.shape}.",
            "One class has (samples,) and (samples, classes), all else the same shape twice.",
        )
    predictions = predictions.astype(np.float64)
    if not np.isfinite(predictions).all():
        return math.nan
    if target is not None and target.kind == "score" and name in DECISIONS:
        predictions = decided(target, predictions)
    if name in ("auc", "roc_auc", "average_precision") and one_class:
        # One class against the rest; of two classes the second one.
        targets = targets[:, None] == np.arange(predictions.shape[1])
        if predictions.shape[1] == 2:
            targets, predictions = targets[:, 1], predictions[:, 1]
    if targets.ndim == 1 or name in WHOLE_ROWS or RANKED.fullmatch(name):
        return _of_rows(name, targets, predictions)
    if _are_zero_or_one(targets):
        name = name.removeprefix("macro_")
    columns = zip(targets.T, predictions.T, strict=True)
    known = [v for v in (_of_rows(name, *each) for each in columns) if not math.isnan(v)]
    return float(np.mean(known)) if known else math.nan


def _of_rows(name: str, targets: Array, predictions: Array) -> float:
    present = ~np.isnan(targets.astype(np.float64))
    kept = present if targets.ndim == 1 else present.all(1)
    if not kept.any():
        return math.nan
    with warnings.catch_warnings(action="ignore"):
        try:
            return float(_value(name, targets[kept], predictions[kept]))
        except ValueError:  # a class alone, a negative number's logarithm
            return math.nan


def _value(name: str, targets: Array, predictions: Array) -> float:
    import scipy.stats
    from sklearn import metrics

    if name in CORRELATIONS or name in NUMBERS:
        _require(name, targets.ndim == predictions.ndim, "numbers, and classes are predicted")
        if name in CORRELATIONS:
            return float(getattr(scipy.stats, CORRELATIONS[name])(targets, predictions)[0])
        value = getattr(metrics, NUMBERS[name])(targets, predictions)
        return float(value**0.5 if name.startswith("rms") else value)
    if name in DECISIONS:
        return _of_decisions(name, targets, predictions)
    one_class = predictions.ndim > targets.ndim
    _require(name, one_class or _are_zero_or_one(targets), "classes or labels of 0 and 1")
    classes = np.arange(predictions.shape[1] if one_class else 2)
    if name == "log_loss":
        return float(metrics.log_loss(targets, predictions, labels=classes))
    if one_class:
        targets = targets[:, None] == classes
    if ranked := RANKED.fullmatch(name):
        return _of_ranking(ranked[1], int(ranked[2]), targets, predictions)
    return float(getattr(metrics, PROBABILITIES[name])(targets.astype(int), predictions))


def _of_decisions(name: str, targets: Array, predictions: Array) -> float:
    from sklearn import metrics

    function, arguments = DECISIONS[name]
    _require(name, (targets == np.rint(targets)).all(), "classes or whole scores")
    decided = predictions.argmax(1) if predictions.ndim > targets.ndim else np.rint(predictions)
    given = targets.astype(int), decided.astype(int)
    if arguments.get("average") == "binary":
        many = predictions.shape[1] > 2 if predictions.ndim > targets.ndim else given[0].max() > 1
        _require(name, not many, f"two classes; of more there is macro_{name}")
    if "weights" in arguments:
        # The classes between them count as distance, whether or not they occur.
        arguments = {**arguments, "labels": np.arange(np.min(given), np.max(given) + 1)}
    return float(getattr(metrics, function)(*given, **arguments))


def _of_ranking(kind: str, places: int, targets: Array, predictions: Array) -> float:
    """`map@K`: the mean of the precision at each found label's place; `top@K`: the share of rows
    with one. Of equal predictions the first counts as the best."""
    order = np.argsort(-predictions, axis=1, kind="stable")[:, :places]
    found = np.take_along_axis(targets.astype(int), order, 1)
    if kind == "top":
        return float(found.any(1).mean())
    precision = found * found.cumsum(1) / np.arange(1, found.shape[1] + 1)
    return float((precision.sum(1) / np.clip(targets.sum(1), 1, places)).mean())


def _are_zero_or_one(targets: Array) -> bool:
    return bool(np.isin(targets[~np.isnan(targets.astype(np.float64))], (0, 1)).all())


def _require(name: str, fits: bool | np.bool_, needed: str) -> None:
    if not fits:
        raise UsageError(
            f"--metric {name} needs {needed}.",
            "Name one that fits what is learned, or learn another kind: --set target=",
        )


def _own_function(metric: MetricName) -> Callable[[Array, Array], Any]:
    place = metric.place or ""
    is_file = place.endswith(".py")
    module = (
        import_user_file(Path(place), "--metric")
        if is_file
        else import_user_module(place, Path(), "--metric")
    )
    found = getattr(module, metric.name, None)
    if not callable(found):
        raise UsageError(
            f"--metric: {place} has no function {metric.name}.",
            f"Define one: def {metric.name}(target, prediction): return 0.5",
        )
    return found  # type: ignore[no-any-return]
