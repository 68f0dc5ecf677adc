"""The attention kernels in a torch_xla graph.

They are lowered here, for a TPU, whatever device the graph is traced on: a TPU runs it, on the CPU
it can be exported and compiled. Needs jax.
"""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch_xla
import torch_xla.distributed.spmd as xs
from torch import Tensor

from tpukit.hardware.detect import emulates_kernels
from tpukit.hardware.kernels.flash_attention import Kernel, Shapes, results_of, with_shapes
from tpukit.knowledge.versions import pair_of


def split_call(mesh: Any, kernel: Kernel, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Each device runs the kernel on its rows: XLA cannot split a kernel by itself."""
    parts = [
        xs.enable_manual_sharding(tensor.clone(), _by_rows(tensor, mesh), mesh=mesh).global_tensor
        for tensor in inputs
    ]
    found = [
        # Each device has a gradient of the bias, from its rows.
        _joined(part if part.ndim == 4 else part.unsqueeze(0), mesh)
        for part in custom_call(kernel, parts)
    ]
    of_bias = [tensor.sum(0) for tensor in found[3:]]
    return [*found[:3], *of_bias]


def _joined(part: Tensor, mesh: Any) -> Tensor:
    shape = torch.Size((part.shape[0] * int(mesh.size()), *part.shape[1:]))
    joined: Tensor = xs.disable_manual_sharding(
        part, _by_rows(part, mesh), shape, mesh=mesh
    ).global_tensor
    return joined


def custom_call(kernel: Kernel, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The kernel in the graph that is being traced, on one device."""
    shapes = tuple((tuple(t.shape), t.dtype) for t in inputs)
    if emulates_kernels(os.environ):
        computation = interpreted(dataclasses.replace(kernel, interpret=True), shapes)
        found: list[Tensor] = torch_xla._XLAC._xla_user_computation(
            f"xla::{kernel.function}_attention", list(inputs), computation
        )
        return found
    payload = lower(kernel, shapes)
    outputs = results_of(kernel, inputs)
    results: list[Tensor] = torch_xla._XLAC._xla_tpu_custom_call(
        list(inputs), payload, [list(shape) for shape, _ in outputs], [t for _, t in outputs]
    )
    return results


@functools.lru_cache(maxsize=256)
def interpreted(kernel: Kernel, inputs: Shapes) -> Any:
    """The kernel as operations of any device, a computation that a graph can call."""
    import jax
    from torch_xla.core.xla_builder import computation_from_module_proto

    # torch_xla partitions without it.
    jax.config.update("jax_use_shardy_partitioner", False)
    lowered = _traced(kernel, inputs).lower()
    module = lowered.compiler_ir("hlo").as_serialized_hlo_module_proto()
    return computation_from_module_proto(kernel.function, module)


def _traced(kernel: Kernel, inputs: Shapes) -> Any:
    function, shapes = with_shapes(kernel, inputs)
    return function.trace(*shapes)


@functools.lru_cache(maxsize=256)
def lower(kernel: Kernel, inputs: Shapes) -> str:
    """What a TPU's custom call is given: the kernel in Mosaic, for these shapes and types."""
    from jax._src.interpreters.mlir import LoweringParameters

    parameters = LoweringParameters(for_export=True)
    with _mosaic_of_libtpu():
        lowered = _traced(kernel, inputs).lower(
            lowering_platforms=("tpu",), _private_parameters=parameters
        )
    return _payload(lowered.compiler_ir("stablehlo"))


@contextlib.contextmanager
def _mosaic_of_libtpu() -> Iterator[None]:
    """The version of Mosaic that torch_xla's libtpu reads: a newer jax writes a newer one."""
    from jax._src import tpu_custom_call

    pair, version_of = pair_of(torch_xla.__version__), tpu_custom_call.get_ir_version
    if pair and pair.mosaic:
        tpu_custom_call.get_ir_version = lambda context: pair.mosaic
    try:
        yield
    finally:
        tpu_custom_call.get_ir_version = version_of


def _payload(module: Any) -> str:
    """The one custom call's body in a lowered module."""
    from jax._src.lib.mlir import ir

    found: list[str] = []

    def look(operation: Any) -> Any:
        if operation.name == "stablehlo.custom_call":
            found.append(operation.attributes["backend_config"].value)
        return ir.WalkResult.ADVANCE

    module.operation.walk(look)
    (payload,) = found
    return payload


def _by_rows(tensor: Tensor, mesh: Any) -> tuple[str | None, ...]:
    """A batch is split, a bias (of three dimensions) is not."""
    first = mesh.axis_names[0] if tensor.ndim == 4 else None
    return (first,) + (None,) * (tensor.ndim - 1)
