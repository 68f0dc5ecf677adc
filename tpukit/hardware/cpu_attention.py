"""Attention in bf16 on a processor with AVX512-BF16: a kernel compiled once on this machine.

Where the processor, the compiler or the shapes do not suit, `attention` returns None and torch's
own attention does the work: same values, more time.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from tpukit.hardware.cpu_kernels import kernel

NAME = "cpu_attention"
WIDTHS = (32, 64)
"""Widths of a head that the kernel has code for."""
BLOCK = 64
"""Queries and keys are multiples of this."""


class _Rows(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("batch", ctypes.c_int64),
        ("head", ctypes.c_int64),
        ("row", ctypes.c_int64),
    )


class _Sizes(ctypes.Structure):
    _fields_ = (
        ("batches", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("queries", ctypes.c_int64),
        ("keys", ctypes.c_int64),
        ("scale", ctypes.c_float),
    )


def attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor | None:
    """Attention as `ModelOps.attention` defines it, or None where the kernel does not apply."""
    if not _suits(query, key, value, bias) or kernel(NAME) is None:
        return None
    if bias is not None:
        bias = bias.float().expand(1, query.shape[1], query.shape[2], key.shape[2]).contiguous()
    attended: Tensor = _Attention.apply(query, key, value, bias)  # type: ignore[no-untyped-call]
    return attended


def _suits(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> bool:
    return (
        query.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and all(t.dtype == torch.bfloat16 and t.stride(-1) == 1 for t in (query, key, value))
        and query.shape[-1] in WIDTHS
        and query.shape[-2] % BLOCK == 0
        and key.shape[-2] % BLOCK == 0
        and query.shape[-1] == value.shape[-1]
        and (bias is None or bias.ndim < 4 or bias.shape[0] == 1)
    )


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        batch, heads, queries, width = query.shape
        out = query.new_empty(batch, queries, heads, width).transpose(1, 2)
        logsum = torch.empty(batch, heads, queries)
        sizes = _sizes(query, key)
        library = kernel(NAME)
        assert library is not None
        library.attention_forward(
            ctypes.byref(sizes), width, *map(_rows, (query, key, value)), _address(bias),
            _rows(out), _address(logsum), torch.get_num_threads(),
        )  # fmt: skip
        ctx.save_for_backward(query, key, value, bias, out, logsum)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        query, key, value, bias, out, logsum = ctx.saved_tensors
        grad = grad.to(query.dtype)
        if grad.stride(-1) != 1:
            grad = grad.contiguous()
        grads = [_like_rows(tensor) for tensor in (query, key, value)]
        bias_grad = torch.zeros_like(bias) if ctx.needs_input_grad[3] else None
        sizes = _sizes(query, key)
        library = kernel(NAME)
        assert library is not None
        library.attention_backward(
            ctypes.byref(sizes), query.shape[-1], *map(_rows, (query, key, value)),
            _address(bias), _rows(out), _rows(grad), _address(logsum), *map(_rows, grads),
            _address(bias_grad), torch.get_num_threads(),
        )  # fmt: skip
        return grads[0], grads[1], grads[2], bias_grad


def _like_rows(tensor: Tensor) -> Tensor:
    batch, heads, rows, width = tensor.shape
    return tensor.new_empty(batch, rows, heads, width).transpose(1, 2)


def _sizes(query: Tensor, key: Tensor) -> _Sizes:
    batch, heads, queries, width = query.shape
    return _Sizes(batch, heads, queries, key.shape[2], width**-0.5)


def _rows(tensor: Tensor) -> Any:
    return ctypes.byref(_Rows(tensor.data_ptr(), *tensor.stride()[:3]))


def _address(tensor: Tensor | None) -> Any:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())
