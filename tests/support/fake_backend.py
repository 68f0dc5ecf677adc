"""A backend for tests: eager on the CPU, of any number of devices."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tpukit.hardware.collectives import Collectives
from tpukit.hardware.eager.backend import EagerBackend
from tpukit.hardware.eager.devices import CpuDevice
from tpukit.hardware.eager.distributed import SingleProcess
from tpukit.hardware.eager.grad_scaling import PlainUpdate
from tpukit.train.config import TrainConfig
from tpukit.train.plan import TrainingRequest
from tpukit.train.requests import TrainingResult
from tpukit.train.run import train_run
from tpukit.train.run_folder import RunFolder
from tpukit.train.task import Task


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


def trained(
    task: Task, folder: Path, backend: EagerBackend | None = None, **config: Any
) -> tuple[TrainingResult, list[str], RunFolder]:
    """A run in this process: its result, what it printed, its folder."""
    settings = {"max_steps": 6, "global_batch_size": 16, "log_every": 2, "ckpt_every": 2,
                "num_workers": 0, **config}  # fmt: skip
    request, lines = TrainingRequest(task, TrainConfig(**settings), RunFolder(folder)), list[str]()
    return train_run(request, backend or FakeBackend(), lines.append), lines, request.folder
