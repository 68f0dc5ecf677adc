"""The processes of a run and what they say to each other on the host, over gloo."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from tpukit.errors import HardwareError

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""A validation or a checkpoint on one process keeps the others waiting for so long at most."""


def launched_world_size() -> int:
    """Processes that a launcher (torchrun) started; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


class Processes(Protocol):
    """The host side of a run's processes."""

    index: int
    count: int

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum of every process' tensor, on its device."""
        ...

    def any_rank(self, flag: bool) -> bool: ...
    def gather(self, value: Any) -> list[Any]: ...
    def barrier(self) -> None: ...
    def close(self) -> None: ...


class SingleRank:
    """No other process to talk to."""

    index = 0
    count = 1

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def any_rank(self, flag: bool) -> bool:
        return flag

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def barrier(self) -> None:
        pass

    def close(self) -> None:
        pass


class GlooCollectives:
    """Processes of an initialised torch.distributed world.

    Flags and objects go through a gloo group of their own, so that they never wait for a GPU.
    """

    def __init__(self, expected: int) -> None:
        self.count = dist.get_world_size()
        self.index = dist.get_rank()
        if self.count != expected:
            raise HardwareError(
                f"The launcher started {expected} processes, but {self.count} found each other.",
                "Let tpukit start them (--devices N), or use torchrun.",
            )
        self._host = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        total = tensor.detach().clone()
        dist.all_reduce(total)
        return total

    def any_rank(self, flag: bool) -> bool:
        raised = torch.tensor(int(flag))
        dist.all_reduce(raised, op=dist.ReduceOp.MAX, group=self._host)
        return bool(raised)

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, group=self._host)
        return values

    def barrier(self) -> None:
        dist.barrier(group=self._host)

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
