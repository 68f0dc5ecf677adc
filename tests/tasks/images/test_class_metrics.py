"""Metrics of classes against their definitions, written out plainly."""

import math

import numpy as np
import pytest

from tpukit.errors import ConfigError
from tpukit.tasks.images.metrics import METRICS, chosen_metrics
from tpukit.tasks.images.settings import METRIC_NAMES, ImagesConfig


@pytest.fixture(params=[0, 1, 2])
def predicted(request):
    """Probabilities with ties, a class that no image is of, and labels."""
    rng = np.random.default_rng(request.param)
    probabilities = np.round(rng.dirichlet(np.ones(5), 60), 1).astype(np.float32)
    return probabilities, rng.choice([0, 1, 3, 4], 60, p=[0.5, 0.3, 0.1, 0.1])


def test_each_name_is_a_metric():
    assert (*METRICS,) == METRIC_NAMES
    with pytest.raises(ConfigError, match="metrics: there is no 'f1'; there are accuracy"):
        ImagesConfig(metrics="roc_auc, f1")
    assert ImagesConfig(metrics="roc_auc, macro_f1").chosen == ["roc_auc", "macro_f1"]


def test_they_are_what_their_definitions_say(predicted):
    probabilities, labels = predicted
    found = chosen_metrics(METRIC_NAMES, probabilities, labels)
    best = [max(range(5), key=lambda k: row[k]) for row in probabilities]
    pairs = [*zip(best, labels.tolist(), strict=True)]
    recalls, scores, areas = [], [], []
    for k in range(5):
        both = sum(b == label == k for b, label in pairs)
        made, there = sum(b == k for b, _ in pairs), sum(label == k for _, label in pairs)
        if there:
            recalls.append(both / there)
            of_it = [row[k] for row, label in zip(probabilities, labels, strict=True) if label == k]
            rest = [row[k] for row, label in zip(probabilities, labels, strict=True) if label != k]
            won = sum((a > b) + 0.5 * (a == b) for a in of_it for b in rest)
            areas.append(won / len(of_it) / len(rest))
        if made or there:
            scores.append(2 * both / (made + there))
    distance = sum((b - label) ** 2 for b, label in pairs) / len(pairs)
    by_chance = np.mean([(b - label) ** 2 for b, _ in pairs for _, label in pairs])
    own = [max(row[label], 1e-12) for row, label in zip(probabilities, labels, strict=True)]
    assert found == pytest.approx({
        "accuracy": sum(b == label for b, label in pairs) / len(pairs),
        "balanced_accuracy": np.mean(recalls), "macro_f1": np.mean(scores),
        "log_loss": -np.mean([math.log(p) for p in own]), "roc_auc": np.mean(areas),
        "quadratic_kappa": 1 - distance / by_chance,
    })  # fmt: skip


def test_what_a_single_class_leaves_undefined_is_nan():
    probabilities = np.array([[0.9, 0.1], [0.8, 0.2]], np.float32)
    found = chosen_metrics(
        ["roc_auc", "quadratic_kappa", "macro_f1"], probabilities, np.zeros(2, int)
    )
    assert math.isnan(found["roc_auc"]) and math.isnan(found["quadratic_kappa"])
    assert found["macro_f1"] == 1.0
