"""One optimizer step over its micro-batches, as every backend makes it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from tpukit.hardware.backend import Average, Batch, StepDroppedError, StepSums, Trained
from tpukit.hardware.step_programs import StepCall


class AfterStep(NamedTuple):
    """`function(module)` once the weights have moved, `module` being the one behind `model`."""

    model: nn.Module
    function: Callable[[nn.Module], object]


class StepParts(Protocol):
    """What a step does differently on each hardware."""

    def micro_batch(
        self, model: nn.Module, *, first: bool, last: bool
    ) -> AbstractContextManager[Callable[[Tensor], None]]:
        """Around one forward and backward pass.

        Gives the backward pass of this rank's part of a loss that is the sum of the ranks' parts.
        It runs on the part times the ranks, times the scale under fp16. Gradients accumulate until
        `step`; they are reduced once, after the last micro-batch.
        """

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        lr: float | Tensor,
        weight: Tensor,
        clip_norm: float | None = None,
        after: AfterStep | None = None,
        average: Callable[[], Average | None] | None = None,
        finite: Tensor | None = None,
    ) -> Tensor:
        """Reduces the gradients, divides them by `weight` (0-d, on the device), clips, steps, calls
        `after`, updates the EMA weights, and clears the gradients.

        Returns the norm of that gradient before clipping.
        """

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """See `Ranks`."""


def step_call(
    parts: StepParts,
    trained: Trained,
    batches: Sequence[Batch],
    lr: float,
    average_weight: float,
) -> StepCall:
    """`ModelSteps.train_step`, as a call that may be a program."""
    numbers = lr, average_weight
    return StepCall("step", partial(_run_step, parts, trained), batches, numbers, trained)


def _run_step(
    parts: StepParts,
    trained: Trained,
    batches: Sequence[Batch],
    lr: float | Tensor,
    average_weight: float | Tensor,
) -> bool:
    try:
        totals = _accumulate(parts, trained, batches)
    except StepDroppedError:
        trained.step_sums.clear()
        trained.optimizer.zero_grad(set_to_none=True)
        return False
    # The gradient of a step in which nothing counts is zero.
    weight = torch.where(totals[0] == 0, 1.0, totals[0])
    function = trained.after_step
    norm = parts.step(
        trained.optimizer,
        lr=lr,
        weight=weight / trained.step_sums.unit,
        clip_norm=trained.clip_norm,
        after=None if function is None else AfterStep(trained.model, function),
        average=lambda: trained.average(average_weight),
        finite=trained.finite,
    )
    trained.record(totals, weight, norm)
    trained.step_sums.clear()
    return True


def _accumulate(parts: StepParts, trained: Trained, batches: Sequence[Batch]) -> Tensor:
    """Gradients of a step's micro-batches; their sums over all ranks."""
    kept = trained.step_sums
    for index, batch in enumerate(batches):
        first, last = index == 0, index == len(batches) - 1
        with parts.micro_batch(trained.model, first=first, last=last) as backward:
            part = trained.forward(batch)
            sums = parts.all_reduce_sum(part.detach()) if first else part.detach()
            _choose_unit(kept, sums[0], len(batch["mask"]))
            backward(part[1] / kept.unit)
            # In place, so that every micro-batch is the same graph.
            kept.totals += part.detach()
    return sums if len(batches) == 1 else parts.all_reduce_sum(kept.totals)


@torch.no_grad()
def _choose_unit(kept: StepSums, weight: Tensor, rows: int) -> None:
    """Keeps the first micro-batch's weight for the step."""
    weight = torch.where(weight == 0, float(rows), weight)
    kept.unit.copy_(torch.where(kept.unit == 0, weight, kept.unit))
