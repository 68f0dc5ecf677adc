"""Collectives between the ranks of a run: tensors on their device, flags and objects over gloo."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from tpukit.errors import HardwareError

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""The longest that a validation or a checkpoint on one rank may keep the others waiting."""


def launched_world_size() -> int:
    """Ranks that a launcher (torchrun) started; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


class Collectives(Protocol):
    """A run's ranks, and what `Backend` does over them."""

    rank: int
    world_size: int

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor: ...
    def any_rank(self, flag: bool) -> bool: ...
    def all_gather_objects(self, value: Any) -> list[Any]: ...
    def barrier(self) -> None: ...
    def close(self) -> None: ...


class SingleRank:
    """A run of one rank: every collective is the identity."""

    rank = 0
    world_size = 1

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def any_rank(self, flag: bool) -> bool:
        return flag

    def all_gather_objects(self, value: Any) -> list[Any]:
        return [value]

    def barrier(self) -> None:
        pass

    def close(self) -> None:
        pass


class GlooCollectives:
    """The ranks of an initialised torch.distributed world.

    Flags and objects go through a gloo group of their own, so that they never wait for a GPU.
    """

    def __init__(self, expected: int, timeout: timedelta = COLLECTIVE_TIMEOUT) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        if self.world_size != expected:
            raise HardwareError(
                f"world size is {self.world_size}, but the launcher started {expected} ranks.",
                "Let tpukit start them (--devices N), or use torchrun.",
            )
        self._host = dist.new_group(backend="gloo", timeout=timeout)

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        total = tensor.detach().clone()
        dist.all_reduce(total)
        return total

    def any_rank(self, flag: bool) -> bool:
        raised = torch.tensor(int(flag))
        dist.all_reduce(raised, op=dist.ReduceOp.MAX, group=self._host)
        return bool(raised)

    def all_gather_objects(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._host)
        return values

    def barrier(self) -> None:
        dist.barrier(group=self._host)

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
