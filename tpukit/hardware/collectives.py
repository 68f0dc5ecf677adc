"""Collectives between the ranks of a run: tensors on their device, flags and objects over gloo."""

import functools
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

from tpukit.errors import HardwareError
from tpukit.hardware.backend import Ranks

SCHEME = "tpukit"
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""The longest that a validation or a checkpoint on one rank may keep the others waiting."""
HEADER_BYTES = 8
"""Size of the number that says how long an object is."""
SHORT_BYTES = 256
"""Longest object, with its header, that ranks exchange in one collective."""


def launched_world_size() -> int:
    """Ranks that a launcher (torchrun) started; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


class Collectives:
    """What `Backend` does over the ranks of a run; of one rank each is the identity."""

    rank = 0
    world_size = 1

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def agree(self, numbers: Sequence[float]) -> Callable[[], list[float]]:
        return lambda: list(numbers)

    def all_gather_objects(self, value: Any) -> list[Any]:
        return [value]

    def close(self) -> None:
        pass


class GlooCollectives(Collectives):
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

    def agree(self, numbers: Sequence[float]) -> Callable[[], list[float]]:
        largest = torch.tensor(numbers, dtype=torch.float64)
        work = dist.all_reduce(largest, dist.ReduceOp.MAX, self._host, async_op=True)

        def wait() -> list[float]:
            work.wait()
            return largest.tolist()

        return wait

    def all_gather_objects(self, value: Any) -> list[Any]:
        # One collective for a flag or a number, where torch's all_gather_object takes two.
        data = pickle.dumps(value)
        sent = len(data).to_bytes(HEADER_BYTES, "little") + data
        gathered = self._gather(sent, SHORT_BYTES)
        longest = max(int.from_bytes(part[:HEADER_BYTES], "little") for part in gathered)
        if HEADER_BYTES + longest > SHORT_BYTES:
            gathered = self._gather(sent, HEADER_BYTES + longest)
        return [pickle.loads(part[HEADER_BYTES:]) for part in gathered]

    def _gather(self, data: bytes, length: int) -> list[bytes]:
        own = torch.frombuffer(bytearray(data[:length].ljust(length, b"\0")), dtype=torch.uint8)
        parts = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(parts, own, group=self._host)
        return [part.numpy().tobytes() for part in parts]

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def uneven_passes(ranks: Ranks, module: nn.Module, filler: Callable[[], object]) -> Iterator[None]:
    """Around forward passes of `module` (unwrapped) that each rank makes as many of as it needs.

    filler: makes one pass, of any shape: sharded weights are gathered from all ranks in each.
    """
    if not _is_sharded(module, ranks):
        yield
        return

    def announce(*_: Any) -> None:
        ranks.all_gather_objects(True)

    # Before FSDP's own hook, which waits for the other ranks' shards.
    hook = module.register_forward_pre_hook(announce, prepend=True)
    try:
        yield
    finally:
        hook.remove()
    while any(ranks.all_gather_objects(False)):
        filler()


def _is_sharded(module: nn.Module, ranks: Ranks) -> bool:
    if ranks.world_size == 1:
        return False
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


# -- where the ranks of a launch find each other: in a store of each attempt's own -----------------
@functools.cache
def init_method() -> str:
    """For `torch.distributed.init_process_group`: as `env://`, but restarts share no keys.

    torchrun keeps its store over a restart (`--max-restarts`), with the addresses of ranks that
    have ended: a rank that reads those before the new ones calls a closed port (pytorch issue
    135712). On several nodes each torchrun counts restarts on its own: there it is `env://`.
    """
    register_rendezvous_handler(SCHEME, _of_this_attempt)  # type: ignore[no-untyped-call]
    return f"{SCHEME}://"


def _of_this_attempt(
    url: str, timeout: timedelta, **options: Any
) -> Iterator[tuple[Store, int, int]]:
    nodes = os.environ.get("GROUP_WORLD_SIZE", "1")
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    for store, rank, world_size in rendezvous("env://", timeout=timeout, **options):
        own = PrefixStore(f"tpukit/attempt-{attempt}", store) if nodes == "1" else store
        yield own, rank, world_size
