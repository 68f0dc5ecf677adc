"""Operators that torch_tpu 0.2.0 computes in too low a precision, in part, or in much memory."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tpukit.hardware.eager.compiling import is_recorded
from tpukit.hardware.kernels.torch_attention import RUNNING, attention_under_autocast

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
    library.impl("scaled_dot_product_attention", _attention, "AutocastPrivateUse1")
    library.impl("batch_norm", batch_norm, "AutogradPrivateUse1")
    library.impl("cross_entropy_loss", cross_entropy, "AutogradPrivateUse1")


def _cast_and_run(operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    cast = (a.float() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)
    with torch.autocast("tpu", enabled=False):
        return operator(*cast, **kwargs)


def _attention(*tensors: Any, **options: Any) -> Tensor:
    ops = RUNNING.get() if is_recorded() else None
    return attention_under_autocast("tpu", ops, *tensors, **options)


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


def cross_entropy(
    scores: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Cross entropy that a program computes from the scores as they are kept, in bf16 too.

    torch_tpu's gathers from fp32 log-probabilities and scatters into fp32 probabilities: each has
    memory of its own.
    """
    if target.is_floating_point() or not scores.numel():
        plain: Tensor = torch.ops.aten.cross_entropy_loss.default.decompose(
            scores, target, weight, reduction, ignore_index, label_smoothing
        )
        return plain
    axis = min(1, scores.ndim - 1)
    losses: Tensor = CrossEntropy.apply(  # type: ignore[no-untyped-call]
        scores.movedim(axis, -1), target, weight, ignore_index, label_smoothing
    )
    if reduction == 0:
        return losses
    total = losses.sum()
    if reduction == 2:
        return total
    counted = (target != ignore_index).to(scores.dtype)
    if weight is not None:
        counted = counted * weight[target.clamp(0, len(weight) - 1)]
    return total / counted.sum()


class CrossEntropy(torch.autograd.Function):
    """Losses (...) of scores (..., classes): each class has a share of its row.

    The shares are made again for the gradient, and the probabilities, which the compiler finds to
    be the same: second derivatives go through them.
    """

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, target: Tensor, weight: Tensor | None, ignored: int, smooth: float
    ) -> Tensor:
        ctx.save_for_backward(scores, target, weight)
        ctx.options = ignored, smooth
        shares = _shares(scores, target, weight, ignored, smooth)
        distances = scores.logsumexp(-1, keepdim=True) - scores
        # A class that a mask gave -inf has no share.
        return torch.where(shares != 0, shares * distances, 0.0).sum(-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        scores, target, weight = ctx.saved_tensors
        shares = _shares(scores, target, weight, *ctx.options)
        probabilities = (scores - scores.logsumexp(-1, keepdim=True)).exp()
        of_scores = shares.sum(-1, keepdim=True) * probabilities - shares
        return gradient.unsqueeze(-1) * of_scores, None, None, None, None


def _shares(
    scores: Tensor, target: Tensor, weight: Tensor | None, ignored: int, smooth: float
) -> Tensor:
    """(..., classes): 1 for the target, or less where labels are smoothed; 0 in ignored rows."""
    count = scores.shape[-1]
    classes = torch.arange(count, device=scores.device, dtype=torch.int32)
    is_target = (classes == target.unsqueeze(-1).int()).to(scores.dtype)
    shares = is_target * (1 - smooth) + smooth / count if smooth else is_target
    if weight is not None:
        shares = shares * weight
    return shares * (target != ignored).unsqueeze(-1)
