"""Operators that torch_tpu 0.2.0 computes in too low a precision, or in part."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

FP32_OPERATORS = (
    *("layer_norm", "group_norm", "rms_norm", "batch_norm"),
    *("softmax.int", "log_softmax.int"),
)
"""Run in fp32 under autocast, as on GPUs. torch_tpu 0.2.0 leaves them in bf16; its layer norm and
its compiled group norm fail where the input is bf16 and the weight fp32."""
_LIBRARIES: list[Any] = []
"""A registration ends with its library."""


def replace_operators() -> None:
    """Registers what takes their place, once a process."""
    if _LIBRARIES:
        return
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    _LIBRARIES.append(library)
    for name in FP32_OPERATORS:
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
        library.impl(name, partial(_cast_and_run, operator), "AutocastPrivateUse1")
    library.impl("batch_norm", batch_norm, "AutogradPrivateUse1")


def _cast_and_run(operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with torch.autocast("tpu", enabled=False):
        return operator(*map(_in_fp32, args), **kwargs)


def _in_fp32(value: Any) -> Any:
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    return value.float() if is_float else value


def batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """Batch norm that updates the running statistics: torch_tpu's leaves them as they were."""
    run = torch.ops.aten.native_batch_norm.default
    if not training:
        normalized: Tensor = run(
            input, weight, bias, running_mean, running_var, False, momentum, eps
        )[0]
        return normalized
    normalized, mean, inverse_deviation = run(input, weight, bias, None, None, True, momentum, eps)
    if running_mean is not None and running_var is not None:
        count = input.numel() // input.shape[1]
        with torch.no_grad():
            variance = (inverse_deviation.square().reciprocal() - eps) * (count / (count - 1))
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_(variance.to(running_var.dtype), momentum)
    return normalized
