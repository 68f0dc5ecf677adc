"""Placeholders: device tensors of torch_xla that have a shape and no storage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch_xla
from torch import Tensor, nn
from torch_xla.core.xla_builder import create_placeholder_tensor

from tpukit.hardware.xla.mesh import DeviceMesh, Spec


@dataclass
class Placeholder:
    """The tensor that a placeholder without storage stands for."""

    kind: str
    """parameters, optimizer, ema, gradients, batch, other."""
    sharding: str | None
    """Its mhlo.sharding; None: replicated."""
    bytes_per_device: int


@dataclass
class Placeholders:
    """Creates device tensors without storage, and knows each one by its handle."""

    devices: int
    by_handle: dict[int, Placeholder] = field(default_factory=dict)
    kind: str = "other"
    """The kind of those created now."""

    def like(self, tensor: Tensor, spec: Spec | None = None) -> Tensor:
        """A placeholder of this shape and dtype, sharded by `spec`."""
        split = self.devices if spec and any(spec) else 1
        size = tensor.numel() * tensor.element_size() // split
        return self._create(tensor, Placeholder(self.kind, _sharding(spec, self.devices), size))

    def replace(self, tensor: Tensor, handle: int) -> None:
        """Gives a tensor that was computed a new placeholder of the kind of its former handle."""
        tensor.data = self._create(tensor, self.by_handle[handle])

    def _create(self, like: Tensor, placeholder: Placeholder) -> Tensor:
        tensor: Tensor = create_placeholder_tensor(tuple(like.shape), like.dtype)
        self.by_handle[handles_of([tensor])[0]] = placeholder
        return tensor

    @contextmanager
    def of_kind(self, kind: str) -> Iterator[None]:
        """Placeholders created inside are of this kind."""
        before, self.kind = self.kind, kind
        try:
            yield
        finally:
            self.kind = before


class TracingMesh(DeviceMesh):
    """A mesh whose transfers create placeholders."""

    def __init__(self, real: DeviceMesh, placeholders: Placeholders) -> None:
        super().__init__(real.mesh, real.device, shard=real.shard)
        self.placeholders = placeholders

    def send(self, value: Tensor, spec: Spec | None = None) -> Tensor:
        return self.placeholders.like(value, spec)

    def zeros_like(self, tensor: Tensor) -> Tensor:
        return self.placeholders.like(tensor, self.parameter_spec(tensor))


@contextmanager
def without_storage() -> Iterator[None]:
    """Parameters that modules register inside have a shape and no storage; buffers are real.

    Ties between parameters stay: a parameter that has no storage already is left as it is.
    """
    register = nn.Module.register_parameter

    def register_shape(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.data.to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_shape  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def handles_of(tensors: Sequence[Tensor]) -> list[int]:
    """The device data behind tensors, as numbers."""
    handles: list[int] = torch_xla._XLAC._get_tensors_handle(list(tensors))
    return handles


def _sharding(spec: Spec | None, devices: int) -> str | None:
    """A spec as mhlo.sharding; None: replicated."""
    if devices == 1 or spec is None or not any(spec):
        return None
    shape = ",".join(str(devices) if axis else "1" for axis in spec)
    return f"{{devices=[{shape}]<=[{devices}]}}"
