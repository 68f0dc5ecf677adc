"""What one of several hosts holds of a tensor that is split over the devices of all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

Offset = tuple[int, ...]


class HostParts(Tensor):
    """The parts of a tensor that this host's devices hold, on the CPU, by their first element's
    place: they need not adjoin. It has the tensor's shape and computes nothing; the methods are
    those by which torch.distributed.checkpoint saves an object in parts."""

    parts: Mapping[Offset, Tensor]

    @staticmethod
    def __new__(cls, shape: Sequence[int], parts: Mapping[Offset, Tensor]) -> HostParts:
        first = next(iter(parts.values()))
        made: HostParts = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=first.dtype)
        made.parts = dict(parts)
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, *_: Any) -> Any:
        raise NotImplementedError(f"{function} of what one host holds of a tensor")

    def __create_write_items__(self, name: str, _: object) -> list[Any]:
        from torch.distributed.checkpoint import metadata, planner

        return [
            planner.WriteItem(
                metadata.MetadataIndex(name, torch.Size(offset)),
                planner.WriteItemType.SHARD,
                tensor_data=planner.TensorWriteData(
                    metadata.ChunkStorageMetadata(torch.Size(offset), part.shape),
                    metadata.TensorProperties.create_from_tensor(part),
                    self.shape,
                ),
            )
            for offset, part in self.parts.items()
        ]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        return self.parts[tuple(index.offset)]


def is_in_parts(tensor: Tensor) -> bool:
    """Whether this rank, or host, has a part of it alone."""
    return isinstance(tensor, (DTensor, HostParts))


def pieces(tensor: Tensor) -> list[Tensor]:
    """All that this rank has of a tensor, sharing its memory."""
    if isinstance(tensor, HostParts):
        return list(tensor.parts.values())
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor]
