"""Compares a forward and backward pass in bf16 with one in fp32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tpukit.hardware.backend import Batch
from tpukit.hardware.options import Precision
from tpukit.train.learner import Learner

if TYPE_CHECKING:
    from tpukit.train.plan import RunPlan

LOSS_TOLERANCE = 0.02
"""Largest relative difference of the loss with which a task is fit for bf16."""
LEAST_COSINE = 0.99
"""Least cosine of the angle between the two whole gradients, likewise."""


def compare_bf16(learner: Learner, plan: RunPlan) -> str:
    """The comparison in words, on the next training batch; weights and buffers are kept."""
    backend, step = learner.backend, learner.steps_done
    [batch, *_] = next(plan.step_batches(backend, step, step + 1).read())
    results = {}
    for precision in ("fp32", "bf16"):
        before = learner.changed_by_passes(outside_of_step=True)
        learner.seed_draws()
        results[precision] = _loss_and_gradient(learner, batch, precision)
        learner.undo_passes(before)
    (exact, gradient), (rough, found) = results["fp32"], results["bf16"]
    left, right = (torch.cat([s[n].flatten() for n in gradient]) for s in (gradient, found))
    cosine = float(torch.nn.functional.cosine_similarity(left, right, dim=0))
    difference = abs(rough - exact) / max(abs(exact), 1e-12)
    is_fit = difference < LOSS_TOLERANCE and cosine > LEAST_COSINE
    verdict = "fit for bf16" if is_fit else "not clearly fit for bf16: try --precision fp32"
    return (
        f"bf16 against fp32, one step: loss differs by {difference:.2%},"
        f" cosine of the gradients {cosine:.4f}: {verdict}"
    )


def _loss_and_gradient(
    learner: Learner, batch: Batch, precision: Precision
) -> tuple[float, dict[str, Tensor]]:
    parameters = {
        n: p for n, p in learner.backend.unwrap(learner.model).named_parameters() if p.requires_grad
    }
    _, sums = learner.sums.forward(batch, [], learner.backend.autocast(precision))
    loss = sums[1] / sums[0]
    gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    found = {n: g.float() for n, g in zip(parameters, gradients, strict=True) if g is not None}
    host = learner.backend.to_host({**found, "": loss.detach()})
    return float(host.pop("")), host
