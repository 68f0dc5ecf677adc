"""Linear layers in training on an AMD CPU: oneDNN's products where they beat MKL's.

With AVX512, MKL's fp32 products reach 70 to 90 % of the speed of oneDNN's there, in most shapes
(docs/performance.md). What suits Intel's CPUs was not measured: they keep torch's own.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from tpukit.hardware.eager.packed_linears import are_plain, can_pack

ROWS, WIDTH = 128, 256
"""Smaller products gain nothing."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, to rounding; with its derivatives of any order."""
    if not _suits(x, weight, bias):
        return F.linear(x, weight, bias)
    product: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return product


class _Linear(torch.autograd.Function):
    """x (..., inputs), weight (outputs, inputs), bias (outputs,) or None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        outputs, inputs = weight.shape
        # oneDNN reads the rows of a weight that is wider than tall no faster than MKL.
        return F.linear(x, weight, bias) if inputs > outputs else _multiply(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        x, weight = ctx.saved_tensors
        outputs, inputs = weight.shape
        for_x, for_weight, for_bias = ctx.needs_input_grad
        # Where this pass is to be differentiated itself, by torch's own operators.
        again = torch.is_grad_enabled() or _transformed(gradient)
        rows, x_rows = gradient.reshape(-1, outputs), x.reshape(-1, inputs)
        x_gradient = weight_gradient = None
        if for_x:
            x_gradient = gradient @ weight if again else _multiply(gradient, weight.t())
        if for_weight:
            by_torch = again or inputs <= outputs
            weight_gradient = rows.t() @ x_rows if by_torch else _multiply(rows.t(), x_rows.t())
        return x_gradient, weight_gradient, rows.sum(0) if for_bias else None


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


def _suits(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a gradient is recorded, of whole fp32 tensors that are large enough."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return False
    large = min(weight.shape) >= WIDTH and x.numel() >= ROWS * x.shape[-1]
    plain = are_plain(x, weight, bias) and not torch.is_autocast_enabled("cpu")
    return large and plain and faster_than_mkl() and not _transformed(x, weight, bias)


def _transformed(*tensors: Tensor | None) -> bool:
    """Whether torch.func or forward-mode derivatives are at work."""
    functorch: bool = torch._C._are_functorch_transforms_active()
    return functorch or any(_has_tangent(tensor) for tensor in tensors if tensor is not None)


def _has_tangent(tensor: Tensor) -> bool:
    dual = forward_ad.unpack_dual(tensor)  # type: ignore[no-untyped-call]
    return dual.tangent is not None


@cache
def faster_than_mkl() -> bool:
    """Whether oneDNN's products are those to use on this CPU."""
    try:
        amd = "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return amd and avx512 and can_pack() and hasattr(torch._C, "_are_functorch_transforms_active")
