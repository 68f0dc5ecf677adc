"""Whether the ranks of a run hold the same parameters."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tpukit.hardware.backend import Backend

ALIKE = 1e-5
"""Largest difference of two ranks' sums over the same values, as a part of their norm: other
hardware, and other numbers of threads, add up in another order."""


@torch.no_grad()
def parted(parameters: Mapping[str, Tensor], backend: Backend) -> list[str]:
    """Names of the parameters that the ranks hold other values of; every rank must call it."""
    held = {n: p for n, p in parameters.items() if not isinstance(p, DTensor) and p.numel()}
    # A compiled step is one program of all hosts, which writes every replica.
    if backend.world_size == 1 or backend.compiles_everything or not held:
        return []
    sums = torch.stack([_sum_and_norm(parameter) for parameter in held.values()])
    own = backend.to_host({"sums": torch.stack([sums, -sums])})["sums"]
    most = torch.tensor(backend.agree(own.flatten().tolist())())
    largest, least = most.view_as(own) * torch.tensor([1, -1]).view(2, 1, 1)
    differs = (largest - least).sum(1) > ALIKE * largest[:, 1]
    return [name for name, is_parted in zip(held, differs.tolist(), strict=True) if is_parted]


def _sum_and_norm(parameter: Tensor) -> Tensor:
    """(2,), in fp32."""
    values = torch.view_as_real(parameter) if parameter.is_complex() else parameter
    values = values.float()
    return torch.stack([values.sum(), values.norm()])
