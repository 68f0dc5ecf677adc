"""A backend for tests: eager on the CPU, of any number of devices."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tpukit.hardware.backend import Batch
from tpukit.hardware.collectives import Collectives
from tpukit.hardware.eager.backend import EagerBackend
from tpukit.hardware.eager.devices import CpuDevice
from tpukit.hardware.eager.distributed import SingleProcess
from tpukit.hardware.eager.grad_scaling import PlainUpdate


class FakeBackend(EagerBackend):
    """A single rank without accelerate. `calls` lists micro-batches and steps, in order.

    `devices` may claim more devices than there are, and `out_of_memory_above` makes a backward pass
    over more rows than that fail as a full device does.
    """

    def __init__(self, devices: int = 1, out_of_memory_above: int | None = None) -> None:
        super().__init__(
            "cpu",
            CpuDevice(),
            "fp32",
            Collectives(),
            SingleProcess(lambda model: model),
            PlainUpdate(),
            compiles=False,
        )
        self.devices = devices
        self.out_of_memory_above = out_of_memory_above
        self.calls: list[str] = []
        self._rows = 0

    def batches(self, loader: Iterable[Mapping[str, Tensor]]) -> Iterator[Batch]:
        for batch in super().batches(loader):
            self._rows = len(next(iter(batch.values())))
            yield batch

    @contextmanager
    def micro_batch(
        self, model: nn.Module, *, first: bool, last: bool
    ) -> Iterator[Callable[[Tensor], None]]:
        self.calls.append(f"micro_batch(first={first}, last={last})")
        with super().micro_batch(model, first=first, last=last) as backward:
            yield backward

    def backward(self, loss: Tensor) -> None:
        if self.out_of_memory_above is not None and self._rows > self.out_of_memory_above:
            raise MemoryError(f"the fake device holds {self.out_of_memory_above} rows")
        super().backward(loss)

    def step(self, optimizer: torch.optim.Optimizer, **how: Any) -> Tensor:
        self.calls.append("step")
        return super().step(optimizer, **how)
