"""A backend for tests: eager on the CPU; it records the members that are used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tpukit.hardware.backend import Average, Batch, OptimizerSettings, ParameterGroup
from tpukit.hardware.collectives import SingleRank
from tpukit.hardware.eager.backend import EagerBackend
from tpukit.hardware.eager.devices import CpuDevice
from tpukit.hardware.eager.distributed import SingleProcess
from tpukit.hardware.eager.grad_scaling import PlainUpdate


class FakeBackend(EagerBackend):
    """A single rank without accelerate. `calls` lists the members used, in order.

    `devices` may claim more devices than there are, and `out_of_memory_above` makes a backward pass
    over more rows than that fail as a full device does.
    """

    def __init__(self, devices: int = 1, out_of_memory_above: int | None = None) -> None:
        super().__init__(
            "cpu",
            CpuDevice(),
            "fp32",
            SingleRank(),
            SingleProcess(lambda model: model),
            PlainUpdate(),
            compiles=False,
        )
        self.devices = devices
        self.out_of_memory_above = out_of_memory_above
        self.calls: list[str] = []
        self._rows = 0

    def prepare(self, model: nn.Module, *, train: bool = True) -> nn.Module:
        self.calls.append("prepare")
        return super().prepare(model, train=train)

    def optimizer(
        self,
        groups: Sequence[ParameterGroup],
        settings: OptimizerSettings,
        own: torch.optim.Optimizer | None = None,
    ) -> torch.optim.Optimizer:
        self.calls.append("optimizer")
        return super().optimizer(groups, settings, own)

    def batches(self, loader: Iterable[Mapping[str, Tensor]]) -> Iterator[Batch]:
        for batch in super().batches(loader):
            self.calls.append("batch")
            self._rows = len(next(iter(batch.values())))
            yield batch

    @contextmanager
    def _recorded_micro_batch(
        self, inner: AbstractContextManager[Any], first: bool, last: bool
    ) -> Iterator[Callable[[Tensor], None]]:
        self.calls.append(f"micro_batch(first={first}, last={last})")
        with inner as backward:
            yield backward

    def micro_batch(
        self, model: nn.Module, *, first: bool, last: bool
    ) -> AbstractContextManager[Callable[[Tensor], None]]:
        inner = super().micro_batch(model, first=first, last=last)
        return self._recorded_micro_batch(inner, first, last)

    def backward(self, loss: Tensor) -> None:
        self.calls.append("backward")
        if self.out_of_memory_above is not None and self._rows > self.out_of_memory_above:
            raise MemoryError(f"the fake device holds {self.out_of_memory_above} rows")
        super().backward(loss)

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        lr: float | Tensor,
        weight: Tensor,
        clip_norm: float | None = None,
        average: Average | None = None,
    ) -> Tensor:
        self.calls.append("step")
        return super().step(optimizer, lr=lr, weight=weight, clip_norm=clip_norm, average=average)

    def finish(self) -> None:
        self.calls.append("finish")
        super().finish()

    def to_host(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self.calls.append("to_host")
        return super().to_host(tensors)
