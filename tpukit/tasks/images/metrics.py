"""Metrics of classes, from probabilities and labels: those that competitions score."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

Probabilities = NDArray[np.float32]
Labels = NDArray[np.int64]
SMALLEST = 1e-12
"""Probability below which log loss does not look."""


def chosen_metrics(
    names: Sequence[str], probabilities: Probabilities, labels: Labels
) -> dict[str, float]:
    """Metrics by name (`METRICS`), of (images, classes) and (images,).

    One that these images do not define (a single class) is NaN.
    """
    return {name: METRICS[name](probabilities, labels) for name in names}


def accuracy(probabilities: Probabilities, labels: Labels) -> float:
    """The share of right predictions."""
    return float((probabilities.argmax(1) == labels).mean())


def balanced_accuracy(probabilities: Probabilities, labels: Labels) -> float:
    """The mean over the classes that occur of the share that was found."""
    right = probabilities.argmax(1) == labels
    return float(np.mean([right[labels == label].mean() for label in np.unique(labels)]))


def macro_f1(probabilities: Probabilities, labels: Labels) -> float:
    """The mean F1 over the classes that occur or are predicted."""
    counts = confusion_matrix(probabilities.argmax(1), labels, probabilities.shape[1])
    both = counts.sum(0) + counts.sum(1)
    return float((2 * counts.diagonal()[both > 0] / both[both > 0]).mean())


def log_loss(probabilities: Probabilities, labels: Labels) -> float:
    """The mean negative logarithm of the right class's probability."""
    own = probabilities[np.arange(len(labels)), labels]
    return float(-np.log(np.maximum(own, SMALLEST)).mean())


def roc_auc(probabilities: Probabilities, labels: Labels) -> float:
    """The area under the ROC curve, one class against the rest: the mean over the classes.

    By ranks (Mann and Whitney, 1947); classes that no image or every image is of are left out.
    """
    areas = []
    for label in range(probabilities.shape[1]):
        is_it = labels == label
        count = int(is_it.sum())
        if 0 < count < len(labels):
            above = rankdata(probabilities[:, label])[is_it].sum() - count * (count + 1) / 2
            areas.append(above / (count * (len(labels) - count)))
    return float(np.mean(areas)) if areas else float("nan")


def quadratic_kappa(probabilities: Probabilities, labels: Labels) -> float:
    """Cohen's kappa with quadratic weights, of ordered classes (Cohen, 1968)."""
    classes = probabilities.shape[1]
    counts = confusion_matrix(probabilities.argmax(1), labels, classes)
    places = np.arange(classes)
    weights = (places[:, None] - places) ** 2
    expected = np.outer(counts.sum(1), counts.sum(0)) / counts.sum()
    by_chance = float((weights * expected).sum())
    return 1 - float((weights * counts).sum()) / by_chance if by_chance else float("nan")


def confusion_matrix(predicted: Labels, labels: Labels, classes: int) -> NDArray[np.int64]:
    """(classes, classes): images of a row's class that were given a column's."""
    counts = np.bincount(labels * classes + predicted, minlength=classes * classes)
    return counts.reshape(classes, classes)


METRICS: Mapping[str, Callable[[Probabilities, Labels], float]] = {
    metric.__name__: metric
    for metric in (accuracy, balanced_accuracy, macro_f1, log_loss, roc_auc, quadratic_kappa)
}
