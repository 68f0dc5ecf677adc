"""A task's losses and metrics on a batch, and their means over a data set."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tpukit.errors import UsageError
from tpukit.hardware.backend import Backend, Batch
from tpukit.train.mistakes.raised import place_of
from tpukit.train.mistakes.returned import check_loss, described, task_mistake
from tpukit.train.monitor.loss_inputs import LossInputs
from tpukit.train.task import Task

MOST_SUMS = 16
"""Length of the device's vector of sums: fixed, so that the first step's graph is every step's."""


class BatchSums:
    """The forward pass, and weighted sums over a data set that stay on the device until read."""

    def __init__(self, task: Task, backend: Backend, model: nn.Module) -> None:
        self.task = task
        self.backend = backend
        self.model = model
        self.inputs = LossInputs(task, backend, model)
        self._names: list[str] = []
        self._totals = torch.zeros(MOST_SUMS, device=backend.device)

    def forward(self, batch: Batch, known: list[str]) -> tuple[list[str], Tensor]:
        """Names of the metrics, and [total weight, weighted sum of each metric, 0 ...]."""
        with self.backend.autocast(), self.inputs.watching(batch):
            returned = self.backend.call(self.model, self.task.loss, batch)
        outputs = check_loss(returned, self.task.loss, len(batch["mask"]))
        self.inputs.look_at(outputs)
        names = metric_names(outputs, known, self.task.loss)
        return names, weighted_sums(outputs, names, batch["mask"])

    @torch.no_grad()
    def add(self, batch: Batch) -> None:
        """Adds one batch's weighted sums, with the model's present weights."""
        self._names, part = self.forward(batch, self._names)
        self._totals += part
        self.backend.finish()

    @torch.no_grad()
    def rows_of(self, batch: Batch) -> dict[str, NDArray[Any]]:
        """The task's validation rows of a batch, and its mask, on the host."""
        with self.backend.autocast():
            found = self.backend.call(self.model, self.task.validation_rows, batch)
        count = len(batch["mask"])
        for name, value in found.items():
            if not isinstance(value, Tensor) or value.shape[:1] != (count,):
                raise task_mistake(
                    self.task.validation_rows,
                    f"returned {name!r} as {described(value)} for a batch of {count} rows",
                    f"Return a tensor of shape ({count}, ...): a value for each row.",
                )
        found = {n: v.float() if v.is_floating_point() else v for n, v in found.items()}
        # All at once: a graph for each would be compiled otherwise.
        self.backend.finish()
        host = self.backend.to_host({**found, "mask": batch["mask"]})
        return {name: tensor.numpy() for name, tensor in host.items()}

    def read(self) -> dict[str, float]:
        """The weighted means over all ranks; starts the sums anew."""
        totals = self.backend.all_reduce_sum(self._totals)
        weight, *sums = self.backend.to_host({"totals": totals})["totals"].tolist()
        self._totals.zero_()
        self.backend.finish()
        return {name: total / weight for name, total in zip(self._names, sums, strict=False)}


def metric_names(
    outputs: Mapping[str, Tensor], known: list[str], method: Callable[..., object]
) -> list[str]:
    """`loss` and the task's other entries, in the order of `known` where it is not empty.

    Raises UsageError where these are other entries than those of the micro-batch before: the sums
    are added up by position.
    """
    names = ["loss", *(name for name in outputs if name not in ("loss", "weight"))]
    if known and set(names) != set(known):
        raise UsageError(
            f"{place_of(method)} returned {', '.join(known)} for one micro-batch and"
            f" {', '.join(names)} for another.",
            "Return the same keys from `loss` for every batch.",
            id="metric-names",
        )
    return known or names


def weighted_sums(outputs: dict[str, Tensor], names: Sequence[str], mask: Tensor) -> Tensor:
    """(MOST_SUMS,): sum(weight), then sum(weight value) of each entry, then zeros.

    Without a `weight` each unmasked row counts 1; a 0-d value is a mean over all that counts. What
    weighs nothing may be of any value, NaN too: the mean of a rank without samples, say.
    """
    mask = mask.float()
    weight = outputs.get("weight")
    if outputs["loss"].ndim == 1:
        weight = mask if weight is None else weight.float() * mask
    else:
        weight = mask.sum() if weight is None else weight.float()
    total = weight.sum()
    sums = []
    for name in names:
        value = outputs[name].float()
        if value.ndim > weight.ndim:  # each row's value beside a mean
            value = _weighted_sum(value, mask) / mask.sum().clamp(min=1)
        sums.append(_weighted_sum(value, weight if value.ndim == weight.ndim else total))
    if len(sums) >= MOST_SUMS:
        raise UsageError(
            f"the task's loss gave {len(sums)} entries.", f"Return at most {MOST_SUMS - 1}."
        )
    return torch.nn.functional.pad(
        torch.stack([total.detach(), *sums]), (0, MOST_SUMS - 1 - len(sums))
    )


def _weighted_sum(value: Tensor, weight: Tensor) -> Tensor:
    return (torch.where(weight != 0, value, 0.0) * weight).sum()
