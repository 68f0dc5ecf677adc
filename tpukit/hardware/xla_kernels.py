"""The TPU's fused attention: JAX's Pallas kernels (forward and backward) in a torch_xla graph.

Score matrices never reach the device's main memory. The kernels are lowered here, for a TPU,
whatever device the graph is traced on: a TPU runs it, on the CPU it can be exported and compiled.
Needs jax; what they are lowered from is private to JAX's flash attention, so its version is pinned.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
from torch import Tensor

LANES = 128
"""Row statistics leave and enter a kernel repeated over the lanes of a vector register."""
BLOCKS = (512, 256, 128)
MASKED = -0.7 * torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Kernel:
    """One of JAX's attention kernels with its settings."""

    function: str
    settings: tuple[tuple[str, Any], ...]

    def __call__(self, query: Any, key: Any, value: Any, *rest: Any) -> Any:
        """The JAX function, without a bias and without segments."""
        from jax.experimental.pallas.ops.tpu import flash_attention as kernels

        function = getattr(kernels, self.function)
        with _one_register_a_row(kernels):
            return function(query, key, value, None, None, *rest, **dict(self.settings))


class _NarrowNumpy:
    """`jax.numpy` for the kernels' module, its rows repeated over one vector register."""

    def __getattr__(self, name: str) -> Any:
        import jax.numpy

        return getattr(jax.numpy, name)

    def broadcast_to(self, array: Any, shape: tuple[int, ...]) -> Any:
        import jax.numpy

        return jax.numpy.broadcast_to(array, (*shape[:-1], min(shape[-1], LANES)))


@contextmanager
def _one_register_a_row(kernels: Any) -> Iterator[None]:
    """JAX repeats a row's statistic over a whole block of keys for the query's backward pass, and
    reads the first lanes only: four times the memory that is needed (0.8 GiB for 36 rows of GPT-2).
    """
    usual = kernels.jnp
    kernels.jnp = _NarrowNumpy()
    try:
        yield
    finally:
        kernels.jnp = usual


Call = Callable[[Kernel, Sequence[Tensor]], list[Tensor]]
"""Runs a kernel: on (query, key, value), and backwards also on the log-sum's two parts (batch,
heads, queries), the output's gradient, and the product of output and gradient summed over width."""


def fits(query: Tensor, key: Tensor) -> bool:
    """Whether the kernels take these shapes: whole blocks, a width below or in multiples of 128."""
    queries, width = query.shape[-2:]
    keys = key.shape[-2]
    whole = queries % BLOCKS[-1] == 0 and keys % BLOCKS[-1] == 0
    return whole and (width < LANES or width % LANES == 0)


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool = False, mesh: Any = None
) -> Tensor:
    """softmax(query key^T / sqrt(width)) value on a TPU (or in a trace for one).

    query (batch, heads, queries, width); key, value (batch, heads, keys, width); see `fits`.
    mesh: the devices that the batch is split over; None where there is one.
    """
    if torch.is_autocast_enabled("xla"):
        dtype = torch.get_autocast_dtype("xla")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    call: Call = custom_call if mesh is None else functools.partial(split_call, mesh)
    if not torch.is_grad_enabled():
        return call(_forward(query, key, causal=causal, residuals=False), (query, key, value))[0]
    result: Tensor = FlashAttention.apply(query, key, value, causal, call)  # type: ignore[no-untyped-call]
    return result


class FlashAttention(torch.autograd.Function):
    """Attention whose backward pass makes the probabilities again, a block at a time."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, causal: bool, call: Call
    ) -> Tensor:
        kernel = _forward(query, key, causal=causal, residuals=True)
        output, sums, largest = call(kernel, (query, key, value))
        # A width under 128 lanes is filled up to them in memory; with the heads side by side it is
        # not. The barrier keeps XLA from holding on to the wide form all the same.
        kept = [_heads_together(tensor) for tensor in (query, key, value, output)]
        xm.optimization_barrier_(kept)
        ctx.save_for_backward(*kept, sums, largest)
        ctx.causal, ctx.call, ctx.heads = causal, call, query.shape[1]
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        *kept, sums, largest = ctx.saved_tensors
        query, key, value, output = (_heads_apart(tensor, ctx.heads) for tensor in kept)
        gradient = gradient.to(query.dtype)
        products = (output.float() * gradient.float()).sum(-1)
        inputs = (query, key, value, sums, largest, gradient, products)
        (of_query,) = ctx.call(_backward_query(query, key, causal=ctx.causal), inputs)
        of_key, of_value = ctx.call(_backward_key(query, key, causal=ctx.causal), inputs)
        return of_query, of_key, of_value, None, None


def _heads_together(tensor: Tensor) -> Tensor:
    """(batch, heads, length, width) to (batch, length, heads width)."""
    return tensor.transpose(1, 2).flatten(2)


def _heads_apart(tensor: Tensor, heads: int) -> Tensor:
    """The way back."""
    batch, length, width = tensor.shape
    return tensor.reshape(batch, length, heads, width // heads).transpose(1, 2)


def split_call(mesh: Any, kernel: Kernel, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Each device runs the kernel on its rows: XLA cannot split a kernel by itself."""
    parts = [
        xs.enable_manual_sharding(tensor.clone(), _by_rows(tensor, mesh), mesh=mesh).global_tensor
        for tensor in inputs
    ]
    return [
        xs.disable_manual_sharding(
            part,
            _by_rows(part, mesh),
            torch.Size((part.shape[0] * int(mesh.size()), *part.shape[1:])),
            mesh=mesh,
        ).global_tensor
        for part in custom_call(kernel, parts)
    ]


def custom_call(kernel: Kernel, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The kernel in the graph that is being traced, on one device."""
    query, key, value = inputs[:3]
    payload = lower(kernel, tuple((tuple(t.shape), t.dtype) for t in inputs))
    rows = (*query.shape[:-1], LANES)
    if kernel.function == "_flash_attention_impl":
        residuals = [(rows, torch.float32)] * 2 * dict(kernel.settings)["save_residuals"]
        output, *statistics = _run(payload, inputs, [(query.shape, query.dtype), *residuals])
        return [output, *(statistic[..., 0] for statistic in statistics)]
    sums, largest, gradient, products = inputs[3:]
    of_query = kernel.function == "_flash_attention_bwd_dq"
    outputs = [query] if of_query else [key, value]
    wide = [query, key, value, _repeat(sums), _repeat(largest), gradient, _repeat(products)]
    return _run(payload, wide, [(t.shape, t.dtype) for t in outputs])


@functools.lru_cache(maxsize=256)
def lower(kernel: Kernel, inputs: tuple[tuple[tuple[int, ...], torch.dtype], ...]) -> str:
    """What a TPU's custom call is given: the kernel in Mosaic, for these shapes and types."""
    # JAX only translates here: it must not take hold of the TPU.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax
    from jax._src.interpreters.mlir import LoweringParameters

    shapes = [jax.ShapeDtypeStruct(shape, _jax_type(dtype)) for shape, dtype in inputs]
    lowered = (
        jax.jit(kernel)
        .trace(*shapes)
        # "for_export" writes the older Mosaic version that every supported libtpu reads.
        .lower(lowering_platforms=("tpu",), _private_parameters=LoweringParameters(for_export=True))
    )
    return _payload(lowered.compiler_ir("stablehlo"))


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


def _run(
    payload: str, inputs: Sequence[Tensor], outputs: Sequence[tuple[Any, torch.dtype]]
) -> list[Tensor]:
    shapes = [list(shape) for shape, _ in outputs]
    dtypes = [dtype for _, dtype in outputs]
    results: list[Tensor] = torch_xla._XLAC._xla_tpu_custom_call(
        list(inputs), payload, shapes, dtypes
    )
    return results


def _forward(query: Tensor, key: Tensor, *, causal: bool, residuals: bool) -> Kernel:
    keys = _block(key)
    return Kernel(
        "_flash_attention_impl",
        (
            ("save_residuals", residuals),
            ("causal", causal),
            ("sm_scale", query.shape[-1] ** -0.5),
            ("block_b", 1),
            ("block_q", _block(query)),
            ("block_k_major", keys),
            ("block_k", keys),
            ("debug", False),
        ),
    )


def _backward_query(query: Tensor, key: Tensor, *, causal: bool) -> Kernel:
    blocks = (
        ("block_q_major", _block(query)),
        ("block_k_major", _block(key)),
        ("block_k", _block(key)),
    )
    return Kernel("_flash_attention_bwd_dq", (*blocks, *_backward_settings(query, causal)))


def _backward_key(query: Tensor, key: Tensor, *, causal: bool) -> Kernel:
    blocks = (
        ("block_q_major", _block(query)),
        ("block_q", _block(query)),
        ("block_k_major", _block(key)),
        ("block_k", _block(key)),
    )
    return Kernel("_flash_attention_bwd_dkv", (*blocks, *_backward_settings(query, causal)))


def _backward_settings(query: Tensor, causal: bool) -> tuple[tuple[str, Any], ...]:
    return (
        ("sm_scale", query.shape[-1] ** -0.5),
        ("causal", causal),
        ("mask_value", MASKED),
        ("debug", False),
    )


def _block(tensor: Tensor) -> int:
    return next(size for size in BLOCKS if tensor.shape[-2] % size == 0)


def _repeat(statistic: Tensor) -> Tensor:
    return statistic.float().unsqueeze(-1).expand(*statistic.shape, LANES)


def _by_rows(tensor: Tensor, mesh: Any) -> tuple[str | None, ...]:
    return (mesh.axis_names[0],) + (None,) * (tensor.ndim - 1)


def _jax_type(dtype: torch.dtype) -> Any:
    import jax.numpy as jnp

    return {torch.float32: jnp.float32, torch.bfloat16: jnp.bfloat16}[dtype]
