"""The TPU's fused attention (`pallas_attention`), forward and backward, in a torch_xla graph.

The kernels are lowered here, for a TPU, whatever device the graph is traced on: a TPU runs it, on
the CPU it can be exported and compiled. The emulation on CPU runs them where it is asked to
(`EMULATED_KERNELS`), in JAX's interpreter. Needs jax.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch_xla
import torch_xla.distributed.spmd as xs
from torch import Tensor
from torch.autograd.function import once_differentiable

from tpukit.hardware.detect import emulates_kernels
from tpukit.knowledge.versions import pair_of

TILES = (512, 256, 128)
"""Sizes of a tile of scores in tokens; the largest that divides their number is taken."""
MOST_BYTES = 2**20
"""Maximum bytes of one head of one tensor; six of them, double-buffered, and an accumulator fit
into 16 MiB of VMEM."""
WIDE_BYTES, WIDEST_BYTES = 256, 512
"""Maximum bytes of one head of one token for every tile, and for those of `WIDE_TILES` in 16 bits
(in 32, libtpu 0.0.21 cannot compile the backward pass)."""
WIDE_TILES = (256,)
"""Tiles of the widest heads: with 512 tokens their sums exceed VMEM, with 128 libtpu fails too."""
MOST_PAIRS = 2**18
"""Maximum queries x keys of a head with a bias; bias and gradient are double-buffered too."""
SUBLANES = 16
"""Number of rows of a bfloat16 vector register."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A function of `pallas_attention`."""

    function: str
    causal: bool
    packed: bool = False
    interpret: bool = False

    def __call__(self, *arrays: Any) -> Any:
        """The function on JAX's arrays."""
        from tpukit.hardware.xla import pallas_attention

        function = getattr(pallas_attention, self.function)
        tiles = tiles_of(arrays[0].shape[2] * arrays[0].dtype.itemsize)
        return function(*arrays, tiles=tiles, causal=self.causal, packed=self.packed,
                        interpret=self.interpret)  # fmt: skip


Shapes = tuple[tuple[tuple[int, ...], torch.dtype], ...]
Call = Callable[[Kernel, Sequence[Tensor]], list[Tensor]]
"""Runs a kernel, its arguments and results as `pallas_attention` has them."""


def fits(query: Tensor, key: Tensor, bias: Tensor | None = None, *, causal: bool) -> bool:
    """Whether the kernels take these shapes: whole tiles, a head that the core can hold, one bias
    for all rows."""
    heads, queries, width = query.shape[1:]
    keys = key.shape[-2]
    token = width * query.element_size()
    tile = tiles_of(token)[-1]
    whole = queries % tile == 0 and keys % tile == 0 and width % SUBLANES == 0
    widest = WIDEST_BYTES if query.element_size() == 2 else WIDE_BYTES
    held = token <= widest and token * max(queries, keys) <= MOST_BYTES
    if bias is not None:
        held = held and bias.shape == (1, heads, queries, keys) and queries * keys <= MOST_PAIRS
    return whole and held and (queries == keys or not causal)


def tiles_of(token_bytes: int) -> tuple[int, ...]:
    """The tiles for a head of this number of bytes a token."""
    return TILES if token_bytes <= WIDE_BYTES else WIDE_TILES


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    *,
    causal: bool = False,
    starts: Tensor | None = None,
    mesh: Any = None,
) -> Tensor:
    """softmax(query key^T / sqrt(width) + bias) value on a TPU (or in a trace for one).

    query (batch, heads, queries, width); key, value (batch, heads, keys, width); bias (1, heads,
    queries, keys), finite; or starts (batch, queries), the first key each query attends to, for
    causal attention; see `fits`.
    mesh: the devices that the batch is split over; None where there is one.
    """
    if torch.is_autocast_enabled("xla"):
        dtype = torch.get_autocast_dtype("xla")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    call: Call = custom_call if mesh is None else functools.partial(split_call, mesh)
    # The kernels take the tokens last. XLA writes the products before them that way.
    turned = [tensor.transpose(-1, -2) for tensor in (query, key, value)]
    if bias is not None:
        turned.append(bias[0].transpose(-1, -2).float())
    if starts is not None:
        turned.append(starts[:, None, None, :].int())
    kernel = Kernel("forward", causal, packed=starts is not None)
    if torch.is_grad_enabled():
        output: Tensor = FlashAttention.apply(call, kernel, *turned)  # type: ignore[no-untyped-call]
    else:
        output = call(kernel, turned)[0]
    return output.transpose(-1, -2)


class FlashAttention(torch.autograd.Function):
    """Attention whose backward pass makes the probabilities again, a tile at a time.

    Tensors are query, key, value (batch, heads, width, tokens) and perhaps a bias (heads, keys,
    queries) or starts (batch, 1, 1, queries).
    """

    @staticmethod
    def forward(ctx: Any, call: Call, kernel: Kernel, *tensors: Tensor) -> Tensor:
        output, log_sums = call(kernel, tensors)
        ctx.save_for_backward(*tensors, output, log_sums)
        ctx.kernel, ctx.call = kernel, call
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *further, output, log_sums = ctx.saved_tensors
        inputs = (query, key, value, output, log_sums, gradient.to(query.dtype), *further)
        gradients = ctx.call(dataclasses.replace(ctx.kernel, function="backward"), inputs)
        of_starts = [None] if ctx.kernel.packed else []
        return None, None, *gradients, *of_starts


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
    query, key, value = inputs[:3]
    if kernel.function == "backward":
        bias = () if kernel.packed else inputs[6:]
        outputs = [(t.shape, t.dtype) for t in (query, key, value, *bias)]
    else:
        log_sums = torch.Size((*query.shape[:2], 1, query.shape[-1]))
        outputs = [(query.shape, query.dtype), (log_sums, torch.float32)]
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
    import jax
    import jax.numpy as jnp

    # JAX only translates here: it must not take hold of the TPU, as an image's JAX_PLATFORMS may
    # ask for.
    jax.config.update("jax_platforms", "cpu")
    types = {torch.float32: jnp.float32, torch.bfloat16: jnp.bfloat16, torch.int32: jnp.int32}
    shapes = [jax.ShapeDtypeStruct(shape, types[dtype]) for shape, dtype in inputs]
    return jax.jit(kernel, keep_unused=True).trace(*shapes)


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
