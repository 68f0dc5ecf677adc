"""Losses of a target, and the predictions that a model's outputs stand for.

Values that a target keeps are numbers in here, not tensors: a tensor would be uploaded in each step
where steps are compiled.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tpukit.errors import ConfigError
from tpukit.train.target import Kind, Target, Values

LossName = Literal["cross_entropy", "bce", "asymmetric", "mse", "mae", "huber", "ordinal"]
LOSSES: Mapping[Kind, tuple[LossName, ...]] = {
    "class": ("cross_entropy",),
    "labels": ("bce", "asymmetric"),
    "number": ("mse", "mae", "huber"),
    "score": ("mse", "mae", "huber", "ordinal", "cross_entropy"),
}
"""Kind of a target -> its losses, the default first."""
FOCUS_NEGATIVE, FOCUS_POSITIVE, SHIFT = 4.0, 1.0, 0.05
"""Exponents and the shift of the asymmetric loss (Ridnik et al., 2021)."""


@dataclass(frozen=True)
class TargetLoss:
    """The loss of a target by its name; None: the first of its kind."""

    target: Target
    name: LossName | None = None

    def __post_init__(self) -> None:
        losses = LOSSES[self.target.kind]
        if self.name is None:
            object.__setattr__(self, "name", losses[0])
        elif self.name not in losses:
            raise ConfigError(
                f"loss {self.name}: what is predicted is {self.target}.",
                f"Its losses are {', '.join(losses)}; another kind: --set target=",
            )

    @property
    def outputs(self) -> int:
        """Numbers that a model gives for each row."""
        if self.target.kind == "score":
            grades = len(self.target.classes)
            return {"ordinal": grades - 1, "cross_entropy": grades}.get(self.name or "", 1)
        return len(self.target.predicted)

    def losses(
        self, scores: Tensor, values: Tensor, *, smoothing: float = 0.0,
        weights: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """(rows,): of a model's outputs (rows, outputs) and `Target.values` of the rows, or of
        classes and labels their probabilities.

        Numbers and scores are standardised by the training rows. weights: of each label (rows,
        labels).
        """
        target = self.target
        if self.name == "cross_entropy":
            places = values
            if target.kind == "score":
                places = self._above(values).sum(1).round().long()
            return F.cross_entropy(scores, places, reduction="none", label_smoothing=smoothing)
        if self.name == "asymmetric":
            each = asymmetric_loss(scores, values)
        elif self.name == "ordinal":
            above = self._above(values)
            return F.binary_cross_entropy_with_logits(scores, above, reduction="none").sum(1)
        elif self.name == "bce":
            each = F.binary_cross_entropy_with_logits(scores, values, reduction="none")
        else:
            functions = {"mse": F.mse_loss, "mae": F.l1_loss, "huber": F.smooth_l1_loss}
            values = self._scaled(values.reshape(scores.shape), inverse=True)
            known = ~values.isnan()
            each = functions[self.name or ""](scores, values.nan_to_num(), reduction="none")
            if target.allows_gaps:  # the mean is that of what a row has
                each = each * known / known.float().mean(1, keepdim=True).clamp(min=1e-6)
        return (each if weights is None else each * weights).mean(1)

    def predictions(self, scores: Tensor) -> Tensor:
        """(rows, `Target.predicted`): probabilities, numbers, or the expected score, of a model's
        outputs."""
        kind = self.target.kind
        if kind == "class":
            return torch.softmax(scores, 1)
        if kind == "labels":
            return torch.sigmoid(scores)
        if self.name in ("ordinal", "cross_entropy"):
            grades = self.target.grades.tolist()
            if self.name == "ordinal":
                first, weights = grades[0], scores.sigmoid()
                factors = [b - a for a, b in pairwise(grades)]
            else:
                first, weights, factors = 0.0, scores.softmax(1), grades
            parts = [weights[:, i : i + 1] * factor for i, factor in enumerate(factors)]
            return torch.cat(parts, 1).sum(1, keepdim=True).add(first)
        if kind == "score":
            # As the other losses of scores: none beyond the ends, which no submission has.
            return self._scaled(scores).clamp(*self.target.grades[[0, -1]].tolist())
        return self._scaled(scores)

    def formula(self) -> str:
        """`predictions` as Python writes it, of `scores`, for code without tpukit."""
        kind, target = self.target.kind, self.target
        if kind in ("class", "labels"):
            return "scores.softmax(1)" if kind == "class" else "scores.sigmoid()"
        grades = target.grades.tolist() if kind == "score" else []
        if self.name == "ordinal":
            steps = [b - a for a, b in pairwise(grades)]
            return f"{grades[0]} + scores.sigmoid() @ torch.tensor({steps})"
        if self.name == "cross_entropy":
            return f"scores.softmax(1) @ torch.tensor({grades})"
        scaled = f"scores * torch.tensor({[*target.spread]}) + torch.tensor({[*target.mean]})"
        return f"({scaled}).clamp({grades[0]}, {grades[-1]})" if kind == "score" else scaled

    def _above(self, values: Tensor) -> Tensor:
        """(rows, scores - 1): whether a row's score is above each of them but the last; of one
        between two the part of the way."""
        steps = pairwise(self.target.grades.tolist())
        return torch.stack([((values - a) / (b - a)).clamp(0, 1) for a, b in steps], 1)

    def _scaled(self, values: Tensor, *, inverse: bool = False) -> Tensor:
        """Standardised values in the unit of the table, or the inverse."""
        mean, spread = self.target.mean, self.target.spread
        columns = [values[:, i : i + 1] for i in range(values.shape[1])]
        pairs = zip(columns, mean or (0.0,), spread or (1.0,), strict=True)
        scaled = [(c - m) / s if inverse else c * s + m for c, m, s in pairs]
        return torch.cat(scaled, 1)


def asymmetric_loss(scores: Tensor, values: Tensor) -> Tensor:
    """(rows, labels): binary cross entropy that easy negatives hardly count in (Ridnik et al.,
    2021)."""
    positive = scores.sigmoid()
    negative = (1 - positive + SHIFT).clamp(max=1)
    own = values * positive.clamp(min=1e-8).log() + (1 - values) * negative.clamp(min=1e-8).log()
    likely = positive * values + negative * (1 - values)
    focus = FOCUS_POSITIVE * values + FOCUS_NEGATIVE * (1 - values)
    with torch.no_grad():
        weight = (1 - likely) ** focus
    return -own * weight


def balanced_weights(target: Target, values: Values) -> Values:
    """Weights by which each class or score counts alike, and of each label both values.

    (rows,) of (rows,) classes or scores: rows / (classes x rows of the class); (rows, labels). Of
    probabilities and scores between two the nearest counts.

    Raises ConfigError for numbers.
    """
    if target.kind == "number":
        raise ConfigError("class_weights=balanced: numbers have no classes.", "Leave it out.")
    counts = np.array(target.counts or (1,) * len(target.classes), np.float64)
    if target.kind == "labels":
        rows = counts / np.maximum(np.array(target.mean), 1e-12)
        ones, zeros = rows / (2 * np.maximum(counts, 1)), rows / (2 * np.maximum(rows - counts, 1))
        return np.asarray(np.where(values >= 0.5, ones, zeros), np.float32)
    if target.kind == "score":
        places = np.abs(values[:, None] - target.grades).argmin(1)
    else:
        places = values.argmax(1) if values.ndim == 2 else values
    # A class of pseudo-labels alone counts as one of a single row.
    return np.asarray(counts.sum() / (len(counts) * np.maximum(counts[places], 1)), np.float32)
