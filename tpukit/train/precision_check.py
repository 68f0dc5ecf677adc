"""Compares a forward and backward pass in bf16 with one in fp32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tpukit.hardware.backend import Batch, Precision
from tpukit.train.batch_sums import weighted_sums
from tpukit.train.learner import Learner
from tpukit.train.mistakes.returned import check_loss

if TYPE_CHECKING:
    from tpukit.train.plan import RunPlan

LOSS_TOLERANCE = 0.02
LEAST_COSINE = 0.99


@dataclass(frozen=True)
class PrecisionComparison:
    """bf16 against fp32 on the same batch and weights."""

    loss_difference: float
    """Relative to the fp32 loss."""
    gradient_cosine: float
    """Cosine of the angle between the two whole gradients."""

    @property
    def fit(self) -> bool:
        return self.loss_difference < LOSS_TOLERANCE and self.gradient_cosine > LEAST_COSINE

    def describe(self) -> str:
        verdict = "fit for bf16" if self.fit else "not clearly fit for bf16: try --precision fp32"
        return (
            f"bf16 against fp32, one step: loss differs by {self.loss_difference:.2%},"
            f" cosine of the gradients {self.gradient_cosine:.4f}: {verdict}"
        )


def compare_bf16(learner: Learner, plan: RunPlan) -> str:
    """The comparison in words, on the next training batch; random state and weights are kept."""
    backend, step = learner.backend, learner.steps_done
    state = backend.state()
    [batch, *_] = next(plan.step_batches(backend, step, step + 1).read())
    results = {}
    for precision in ("fp32", "bf16"):
        backend.load_state(state)
        results[precision] = _loss_and_gradient(learner, batch, precision)
    backend.load_state(state)
    return _compare(results["fp32"], results["bf16"]).describe()


def _loss_and_gradient(
    learner: Learner, batch: Batch, precision: Precision
) -> tuple[float, dict[str, Tensor]]:
    parameters = {
        n: p for n, p in learner.backend.unwrap(learner.model).named_parameters() if p.requires_grad
    }
    with learner.backend.autocast(precision):
        returned = learner.backend.call(learner.model, learner.task.loss, batch)
    outputs = check_loss(returned, learner.task.loss, len(batch["mask"]))
    sums = weighted_sums(outputs, ["loss"], batch["mask"])
    loss = sums[1] / sums[0]
    gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    found = {n: g.float() for n, g in zip(parameters, gradients, strict=True) if g is not None}
    host = learner.backend.to_host({**found, "": loss.detach()})
    return float(host.pop("")), host


def _compare(
    exact: tuple[float, dict[str, Tensor]], rough: tuple[float, dict[str, Tensor]]
) -> PrecisionComparison:
    dot = sum(float((exact[1][n] * rough[1][n]).sum()) for n in exact[1])
    norms = [
        sum(float(g.square().sum()) for g in side[1].values()) ** 0.5 for side in (exact, rough)
    ]
    cosine = dot / (norms[0] * norms[1]) if norms[0] and norms[1] else 0.0
    difference = abs(rough[0] - exact[0]) / max(abs(exact[0]), 1e-12)
    return PrecisionComparison(difference, cosine)
