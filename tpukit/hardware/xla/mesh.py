"""XLA devices as one mesh, and where tensors lie on it: split by rows, in shards, or everywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch import Tensor, nn

from tpukit.hardware.backend import Batch
from tpukit.hardware.host_parts import HostParts
from tpukit.hardware.modules import move_tensors, repeated_blocks

AXIS = "data"
Spec = tuple[str | None, ...]


class DeviceMesh:
    """XLA devices in a row: batches, and with `shard` parameters, are split along it."""

    def __init__(self, mesh: Any, device: torch.device, *, shard: bool) -> None:
        self.mesh = mesh
        self.device = device
        self.devices = int(mesh.size())
        self.hosts = xr.process_count()
        self.shard = shard

    @classmethod
    def open(cls, *, shard: bool) -> DeviceMesh:
        """Starts the runtime; must come before any tensor is on a device."""
        xr.use_spmd()
        count = xr.global_runtime_device_count()
        # A backward pass on the CPU before this call would break every later one on the device.
        device = torch_xla.device()
        return cls(xs.Mesh(np.arange(count), (count,), (AXIS,)), device, shard=shard)

    # -- sending ----------------------------------------------------------------------------------
    def send(self, value: Tensor, spec: Spec | None = None) -> Tensor:
        """A copy of a host tensor on the device, with memory of its own."""
        sharding = None
        if spec is not None:
            sharding = xs.ShardingSpec(self.mesh, spec, minibatch=self.hosts > 1)
        # `.to` would bake 0-d tensors that are 0 or 1 into the graph.
        sent: Tensor = xm.send_cpu_data_to_device([value], self.device, sharding)[0]
        return sent

    def send_batch(self, batch: Mapping[str, Tensor]) -> Batch:
        """A host batch on the devices: each has its rows."""
        return {name: self._send_rows(tensor) for name, tensor in batch.items()}

    def _send_rows(self, tensor: Tensor) -> Tensor:
        rows = tensor.shape[0] * self.hosts if tensor.ndim else 0
        if rows == 0 or rows % self.devices:
            return self.send(tensor)
        spec = (AXIS,) + (None,) * (tensor.ndim - 1)
        return self.send(tensor, spec)

    # -- models -----------------------------------------------------------------------------------
    def place(self, model: nn.Module) -> None:
        """Moves a model to the devices in place; ties between its parameters stay."""
        move_tensors(model, lambda p: self.send(p, self.parameter_spec(p)), self.send)
        for parameter in model.parameters():
            count_as_written(parameter)
        if self.shard:
            for block in repeated_blocks(model):
                block.register_forward_hook(self._split_rows)

    def parameter_spec(self, parameter: Tensor) -> Spec | None:
        """The longest axis that divides is split; None: every device has it all."""
        if not self.shard:
            return None
        fitting = [n if n % self.devices == 0 else 0 for n in parameter.shape]
        if max(fitting, default=0) == 0:
            return None
        axis = fitting.index(max(fitting))
        return tuple(AXIS if i == axis else None for i in range(parameter.ndim))

    def _split_rows(self, module: nn.Module, inputs: Sequence[Any], output: Any) -> Any:
        """Keeps activations split by rows where parameters in shards would have them otherwise."""
        if not isinstance(output, Tensor) or output.shape[0] % self.devices:
            return output
        spec = (AXIS,) + (None,) * (output.ndim - 1)
        return xs.mark_sharding_with_gradients(output, self.mesh, spec)

    def zeros_like(self, tensor: Tensor) -> Tensor:
        """Zeros with memory of their own: a lazy zero would make the first step another graph."""
        return self.send(torch.zeros(tensor.shape, dtype=tensor.dtype), self.parameter_spec(tensor))

    # -- reading and filling ----------------------------------------------------------------------
    def to_host(
        self, tensors: Mapping[str, Tensor], *, in_parts: bool = False
    ) -> dict[str, Tensor]:
        """Copies on the CPU, whole or, with `in_parts`, of what this host holds of tensors that are
        split over several. Those that are still lazy are computed by one program."""
        lazy = [tensor for tensor in tensors.values() if is_on_xla(tensor)]
        torch_xla._XLAC._xla_sync_multi(lazy, [], True, True)
        xm.wait_device_ops()
        return {name: self._read(tensor.detach(), in_parts) for name, tensor in tensors.items()}

    def _read(self, tensor: Tensor, in_parts: bool) -> Tensor:
        is_split = is_on_xla(tensor) and is_sharded(tensor)
        if is_split and in_parts and self.hosts > 1:
            return HostParts(tensor.shape, self._parts(tensor))
        # torch_xla compiles a program, uncached, for each split tensor that is read as a whole.
        if not is_split or self.hosts > 1:
            return tensor.to("cpu", copy=True)
        whole = torch.empty(tensor.shape, dtype=tensor.dtype)
        for start, part in self._parts(tensor).items():
            whole[tuple(slice(n, n + size) for n, size in zip(start, part.shape, strict=True))] = (
                part
            )
        return whole

    def _parts(self, tensor: Tensor) -> dict[tuple[int, ...], Tensor]:
        """What this host's devices hold of a tensor, on the CPU, by the place of its beginning."""
        (parts,) = torch_xla._XLAC._get_local_shards([tensor])
        (places,) = torch_xla._XLAC._get_local_shard_replica_and_indices([tensor])
        return {
            # A part is padded where its axis does not divide.
            tuple(s.start for s in place): part[tuple(slice(s.stop - s.start) for s in place)]
            for (part, _), (replica, place) in zip(parts, places, strict=True)
            if replica == 0
        }

    def fill(self, target: Tensor, value: Tensor) -> None:
        """Puts a host tensor's values into a tensor of the device, which keeps its placement."""
        if not is_on_xla(target):
            target.copy_(value)
            return
        spec = self.parameter_spec(target) if is_sharded(target) else None
        target.data = self.send(value.to(target.dtype), spec)
        count_as_written(target)


def count_as_written(tensor: Tensor) -> None:
    """Counts one write in place, as each step adds: no operation, no change of values.

    Views of a tensor that was never written are traced otherwise than those of one that was: the
    second step in fp32 would be another graph than the first.
    """
    torch._functionalize_commit_update(tensor)


def is_on_xla(tensor: Tensor) -> bool:
    """Whether a tensor is on an XLA device."""
    return tensor.device.type == "xla"


def is_sharded(tensor: Tensor) -> bool:
    """Whether devices hold different parts of this tensor."""
    spec = torch_xla._XLAC._get_xla_sharding_spec(tensor)
    return bool(spec) and "replicated" not in spec
