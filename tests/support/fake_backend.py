"""A backend for tests: eager on the CPU, of any number of devices."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tpukit.hardware.collectives import Collectives
from tpukit.hardware.eager.backend import EagerBackend
from tpukit.hardware.eager.devices import CpuDevice
from tpukit.hardware.eager.distributed import SingleProcess
from tpukit.hardware.eager.grad_scaling import PlainUpdate


class FakeBackend(EagerBackend):
    """A single rank without accelerate. `calls` lists micro-batches and steps, in order.

    `devices` may claim more devices than there are.
    """

    def __init__(self, devices: int = 1) -> None:
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
        self.calls: list[str] = []

    @contextmanager
    def micro_batch(
        self, model: nn.Module, *, first: bool, last: bool
    ) -> Iterator[Callable[[Tensor], None]]:
        self.calls.append(f"micro_batch(first={first}, last={last})")
        with super().micro_batch(model, first=first, last=last) as backward:
            yield backward

    def step(self, optimizer: torch.optim.Optimizer, **how: Any) -> Tensor:
        self.calls.append("step")
        return super().step(optimizer, **how)
