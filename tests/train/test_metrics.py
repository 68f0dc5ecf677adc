"""Metrics by name: scikit-learn's values and directions, whatever ties and gaps the rows have."""

import math
from itertools import product

import numpy as np
import pytest
import scipy.stats
from sklearn import metrics as sk

from tpukit.errors import ConfigError, UsageError
from tpukit.train.metric_names import LARGEST, LEAST, parse_metrics
from tpukit.train.metrics import measured, metrics_of_first_rows, named_metrics
from tpukit.train.target import Target

CASES = [pytest.param(seed, marks=[pytest.mark.slow] if seed >= 8 else []) for seed in range(100)]
AVERAGES = ("macro", "micro", "weighted")


def value(name, targets, predictions):
    return measured(parse_metrics(name)[0], np.asarray(targets), np.asarray(predictions))


def same(found, expected, what):
    assert found == pytest.approx(expected, abs=1e-9, nan_ok=True), what


def one_class(seed):
    """Probabilities with ties, and labels of which some classes have none."""
    rng = np.random.default_rng(seed)
    classes, rows = int(rng.integers(2, 7)), int(rng.integers(5, 60))
    tied = np.round(rng.dirichlet(np.ones(classes), rows), 1) + 0.01
    there = rng.choice(classes, int(rng.integers(1, classes + 1)), replace=False)
    return tied / tied.sum(1, keepdims=True), rng.choice(there, rows), classes


@pytest.mark.parametrize("seed", CASES)
@pytest.mark.filterwarnings("ignore")
def test_of_one_class(seed):
    scores, labels, classes = one_class(seed)
    best, every = scores.argmax(1), range(classes)
    expected = {
        "accuracy": sk.accuracy_score(labels, best),
        "balanced_accuracy": sk.balanced_accuracy_score(labels, best),
        "mcc": sk.matthews_corrcoef(labels, best),
        "kappa": sk.cohen_kappa_score(labels, best),
        "qwk": sk.cohen_kappa_score(labels, best, labels=[*every], weights="quadratic"),
        "log_loss": sk.log_loss(labels, scores, labels=[*every]),
        "lrap": sk.label_ranking_average_precision_score(np.eye(classes)[labels], scores),
        "top@2": sk.accuracy_score(
            labels, [y if y in np.argsort(-s, kind="stable")[:2] else -1
                     for s, y in zip(scores, labels, strict=True)],
        ),
        "map@3": np.mean([
            next((1 / (place + 1) for place, k in enumerate(np.argsort(-s, kind="stable")[:3])
                  if k == y), 0.0)
            for s, y in zip(scores, labels, strict=True)
        ]),
    }  # fmt: skip
    expected["quadratic_kappa"] = expected["qwk"]
    for kind, average in product(("f1", "precision", "recall"), AVERAGES):
        if f"{average}_{kind}" in LARGEST:
            score = getattr(sk, f"{kind}_score")(labels, best, average=average, zero_division=0)
            expected[f"{average}_{kind}"] = score
    found = [k for k in every if 0 < (labels == k).sum() < len(labels)]
    areas = [sk.roc_auc_score(labels == k, scores[:, k]) for k in found]
    expected["auc"] = expected["roc_auc"] = np.mean(areas) if areas else math.nan
    if classes == 2:
        expected["f1"] = sk.f1_score(labels, best, zero_division=0)
        expected["average_precision"] = sk.average_precision_score(labels == 1, scores[:, 1])
    else:
        precisions = [sk.average_precision_score(labels == k, scores[:, k]) for k in every]
        expected["average_precision"] = np.mean(precisions)
    for name, wanted in expected.items():
        same(value(name, labels, scores), wanted, name)


@pytest.mark.parametrize("seed", CASES)
@pytest.mark.filterwarnings("ignore")
def test_of_several_labels(seed):
    rng = np.random.default_rng(seed)
    rows, labels = int(rng.integers(4, 50)), int(rng.integers(2, 6))
    scores = np.round(rng.random((rows, labels)), 1)
    targets = (rng.random((rows, labels)) < rng.random(labels)).astype(float)
    made = scores > 0.5
    for average in AVERAGES:
        wanted = sk.f1_score(targets, made, average=average, zero_division=0)
        same(value(f"{average}_f1", targets, scores), wanted, average)
    same(value("accuracy", targets, scores), sk.accuracy_score(targets, made), "accuracy")
    wanted = sk.label_ranking_average_precision_score(targets, scores)
    same(value("lrap", targets, scores), wanted, "lrap")
    targets[rng.random((rows, labels)) < 0.1] = np.nan
    areas, losses = [], []
    for column, of_column in zip(targets.T, scores.T, strict=True):
        kept = ~np.isnan(column)
        if kept.any():
            losses.append(sk.log_loss(column[kept], of_column[kept], labels=[0, 1]))
        if len({*column[kept]}) == 2:
            areas.append(sk.roc_auc_score(column[kept], of_column[kept]))
    same(value("auc", targets, scores), np.mean(areas) if areas else math.nan, "auc")
    same(value("log_loss", targets, scores), np.mean(losses), "log_loss")


@pytest.mark.parametrize("seed", CASES)
@pytest.mark.filterwarnings("ignore")
def test_of_numbers_and_scores(seed):
    rng = np.random.default_rng(seed)
    rows, columns = int(rng.integers(3, 60)), int(rng.integers(1, 4))
    targets = rng.integers(1, 7, (rows, columns)).astype(float)
    guesses = np.abs(np.round(targets + rng.normal(0, 1.5, targets.shape), 1))
    targets[rng.random(targets.shape) < 0.1] = np.nan
    kept = ~np.isnan(targets).all(0)
    wanted = {
        "rmse": lambda a, b: sk.mean_squared_error(a, b) ** 0.5, "mse": sk.mean_squared_error,
        "mae": sk.mean_absolute_error, "median_ae": sk.median_absolute_error,
        "rmsle": lambda a, b: sk.mean_squared_log_error(a, b) ** 0.5,
        "mape": sk.mean_absolute_percentage_error, "r2": sk.r2_score,
        "pearson": lambda a, b: scipy.stats.pearsonr(a, b)[0],
        "spearman": lambda a, b: scipy.stats.spearmanr(a, b)[0],
        "qwk": lambda a, b: sk.cohen_kappa_score(
            a.astype(int), np.rint(b).astype(int), weights="quadratic", labels=[*range(-9, 20)]),
    }  # fmt: skip
    for name, function in wanted.items():
        each = []
        for a, b in zip(targets.T[kept], guesses.T[kept], strict=True):
            known = ~np.isnan(a)
            each.append(function(a[known], b[known]) if known.sum() > 1 else math.nan)
        if any(map(math.isnan, each)):
            continue
        same(value(name, targets, guesses), np.mean(each), name)
        same(value(name, targets[:, 0], guesses[:, 0]), each[0], name)


def test_directions_are_those_of_a_better_prediction():
    """Of every name, a perfect prediction is the best that its direction knows."""
    rng = np.random.default_rng(0)
    classes, numbers = rng.integers(0, 2, 80), rng.integers(1, 6, 80).astype(float)
    for name in (*LARGEST, *LEAST, "map@2", "top@1"):
        metric = parse_metrics(name)[0]
        try:
            good, bad = (
                measured(metric, classes, np.eye(2)[k]) for k in (classes, rng.permutation(classes))
            )
        except UsageError:
            good, bad = (measured(metric, numbers, k) for k in (numbers, rng.permutation(numbers)))
        assert good > bad if metric.largest else good < bad, name


def test_predictions_that_are_not_finite_are_no_metric():
    for name in ("rmse", "mae", "qwk"):
        assert math.isnan(value(name, [1.0, 2.0], [1.0, math.nan]))
    assert math.isnan(value("auc", [[0, 1], [1, 0]], [[0.5, 0.5], [math.inf, 0.5]]))
    assert math.isnan(value("auc", [0, 0], [[0.9, 0.1], [0.8, 0.2]]))
    assert math.isnan(value("rmsle", [1.0, 2.0], [1.0, -3.0]))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("f2", "there is no 'f2'; there are accuracy"),
        ("max:rmse", "of rmse the least is the best. Use --metric rmse"),
        ("mine.py:gini", "whether more of it is better is not known. Write max:mine.py:gini"),
    ],
)
def test_a_name_that_is_wrong_is_said_with_the_right_one(text, told):
    with pytest.raises(ConfigError) as error:
        parse_metrics(text)
    assert told in f"{error.value.message} {error.value.hint}"


def test_what_a_metric_cannot_take_is_an_error():
    probabilities = np.full((4, 3), 1 / 3)
    for name, targets, predictions, told in [
        ("rmse", [0, 1, 2, 0], probabilities, "rmse needs numbers"),
        ("f1", [0, 1, 2, 0], probabilities, "two classes; of more there is macro_f1"),
        ("auc", [1.5, 2.0], [1.0, 2.0], "auc needs classes or labels"),
        ("qwk", [1.5, 2.0], [1.0, 2.0], "qwk needs classes or whole scores"),
        ("mae", [1.0, 2.0], [[1.0], [2.0], [3.0]], "targets (2,), predictions (3, 1)"),
    ]:
        with pytest.raises(UsageError) as error:
            value(name, targets, predictions)
        assert told in error.value.message
    with pytest.raises(UsageError, match="needs 'target' of each validation sample"):
        named_metrics(parse_metrics("mae"), {"score": np.ones(2)})


def test_a_function_of_ones_own(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def largest_error(true, made):\n    return abs(true - made).max()\n")
    (metric,) = parse_metrics(f"min:{file}:largest_error")
    assert metric.name == "largest_error" and not metric.largest
    assert measured(metric, np.array([1.0, 2.0]), np.array([1.5, 5.0])) == 3.0
    (lost,) = parse_metrics(f"min:{file}:other")
    with pytest.raises(UsageError, match=r"mine.py has no function other"):
        measured(lost, np.ones(2), np.ones(2))


def test_a_function_that_needs_all_classes_is_not_refused_by_rows_of_one(tmp_path):
    """A run ended before its first step where the first validation batch had one class."""
    file = tmp_path / "needs.py"
    file.write_text("def needs(true, made):\n    assert len({*true}) == 2\n    return made[3]\n")
    names = parse_metrics(f"max:{file}:needs")
    rows = {"target": np.zeros(3), "prediction": np.ones((3, 2))}
    target = Target("class", ("c",), ("a", "b"))
    assert math.isnan(metrics_of_first_rows(names, rows, target)["needs"])
    with pytest.raises(IndexError):
        metrics_of_first_rows(names, {**rows, "target": np.array([0, 1, 0])}, target)
    with pytest.raises(UsageError, match="has no function other"):
        metrics_of_first_rows(parse_metrics(f"max:{file}:other"), rows, target)


def test_decisions_about_scores_are_of_the_nearest_one():
    """Also where there are gaps between them: as `predict` writes them."""
    target = Target("score", ("score",), ("1", "4", "8"))
    rows = {"target": np.array([1.0, 4.0, 8.0, 8.0]), "prediction": np.array([2.4, 2.6, 6.1, 9.7])}
    assert named_metrics(parse_metrics("accuracy,qwk,mae"), rows, target) == {
        "accuracy": 1, "qwk": 1, "mae": pytest.approx(1.6),
    }  # fmt: skip
    assert named_metrics(parse_metrics("accuracy"), rows) == {"accuracy": 0}
