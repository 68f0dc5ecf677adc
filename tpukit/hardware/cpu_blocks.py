"""`tpukit.hardware.block_ops` on a processor with AVX512-BF16: one pass over memory each.

For bf16 branches. Where the kernel does not apply, the functions return None.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpukit.hardware.block_ops import channel_factor
from tpukit.hardware.cpu_kernels import kernel

NAME = "cpu_blocks"
LANES = 16
"""Widths are multiples of this."""
STREAMS = (torch.float32, torch.bfloat16)


def modulated_norm(
    x: Tensor, gain: Tensor, shift: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor] | None:
    """See `ModelOps.modulated_norm`; the normed tokens are bf16."""
    if not (_in_bf16() and _suits(x)):
        return None
    factor = channel_factor(gain.view(-1), scale).squeeze(1).float().contiguous()
    passed, normed = _Norm.apply(x, factor, shift.float().contiguous())  # type: ignore[no-untyped-call]
    return passed, normed


def gated_sum(x: Tensor, gate: Tensor, branch: Tensor) -> Tensor | None:
    """See `ModelOps.gated_sum`."""
    if branch.dtype != torch.bfloat16 or not (_suits(x) and branch.is_contiguous()):
        return None
    total: Tensor = _GatedSum.apply(x, gate.float().contiguous(), branch)  # type: ignore[no-untyped-call]
    return total


def silu_mlp(x: Tensor, first: nn.Linear, second: nn.Linear) -> Tensor | None:
    """See `ModelOps.silu_mlp`; the result is bf16."""
    if first.bias is None or first.out_features % LANES or not (_in_bf16() and _suits(x)):
        return None
    # Without its bias: torch would copy that to every row first.
    product = F.linear(x, first.weight)
    raised: Tensor = _Silu.apply(product, first.bias.float())  # type: ignore[no-untyped-call]
    mapped: Tensor = second(raised)
    return mapped


def _in_bf16() -> bool:
    return torch.is_autocast_enabled("cpu") and (torch.get_autocast_dtype("cpu") == torch.bfloat16)


def _suits(x: Tensor) -> bool:
    return (
        x.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and x.dtype in STREAMS
        and x.ndim == 3
        and x.shape[-1] % LANES == 0
        and x.is_contiguous()
        and kernel(NAME) is not None
    )


class _Norm(torch.autograd.Function):
    """(x, x / |x| factor + shift); factor and shift are (batch, width), float."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        normed = torch.empty_like(x, dtype=torch.bfloat16)
        inverse = torch.empty(x.shape[:2])
        _call("block_norm", x, x, factor, shift, normed, inverse)
        ctx.save_for_backward(x, factor, inverse)
        ctx.set_materialize_grads(False)
        return x.view_as(x), normed

    @staticmethod
    def backward(
        ctx: Any, passed: Tensor | None, normed_grad: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, factor, inverse = ctx.saved_tensors
        if normed_grad is None:
            return passed, None, None
        if passed is not None:
            passed = passed.to(x.dtype).contiguous()
        x_grad = torch.empty_like(x)
        factor_grad, shift_grad = torch.empty_like(factor), torch.empty_like(factor)
        _call(
            "block_norm_backward", x, x, inverse, factor, passed,
            normed_grad.to(torch.bfloat16).contiguous(), x_grad, factor_grad, shift_grad,
        )  # fmt: skip
        return x_grad, factor_grad, shift_grad


class _GatedSum(torch.autograd.Function):
    """x + gate branch; gate is (batch, width), float."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, branch: Tensor) -> Tensor:
        total = torch.empty_like(x)
        _call("block_gated_sum", x, x, gate, branch, total)
        ctx.save_for_backward(gate, branch)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gate, branch = ctx.saved_tensors
        grad = grad.contiguous()
        branch_grad, gate_grad = torch.empty_like(branch), torch.empty_like(gate)
        _call("block_gated_sum_backward", grad, grad, gate, branch, branch_grad, gate_grad)
        return grad, gate_grad, branch_grad


class _Silu(torch.autograd.Function):
    """silu(x + bias); bias is (width,), float."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        needed = any(ctx.needs_input_grad)
        result = torch.empty_like(x) if needed else x
        _call("block_silu", x, x, bias, result)
        if needed:
            ctx.save_for_backward(x, bias)
        else:
            ctx.mark_dirty(x)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, bias = ctx.saved_tensors
        grad = grad.to(x.dtype).contiguous()
        x_grad, bias_grad = torch.empty_like(x), torch.empty_like(bias)
        _call("block_silu_backward", grad, grad, x, bias, x_grad, bias_grad)
        return x_grad, bias_grad


def _call(function: str, stream: Tensor, *tensors: Tensor | None) -> None:
    library = kernel(NAME)
    assert library is not None
    pointers = [ctypes.c_void_p(None if t is None else t.data_ptr()) for t in tensors]
    sizes = [ctypes.c_int64(size) for size in stream.shape]
    half = int(stream.dtype == torch.bfloat16)
    getattr(library, function)(half, *sizes, *pointers, torch.get_num_threads())
