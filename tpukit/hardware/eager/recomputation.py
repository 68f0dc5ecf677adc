"""Activation checkpointing within a program of torch_tpu, and the order of its parts."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tpukit.hardware.eager.recorder import GENERATOR, graphs


def in_order(tensors: Sequence[Tensor]) -> None:
    """What is recorded after this begins when all these are computed; they are replaced."""
    if tensors:
        values = torch.ops.tpu._optimization_barrier([tensor.detach() for tensor in tensors])
        for tensor, value in zip(tensors, values, strict=True):
            tensor.data = value


class Recomputation(torch.autograd.Function):
    """Activation checkpointing that the compiler keeps: it merges what is computed twice.

    The second pass begins with barriers, which also wait for the gradient; it draws the same
    random numbers.
    """

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        kind = tensors[0].device.type
        ctx.function = function
        ctx.cast = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        ctx.random = graphs().get_device_state_tensor(GENERATOR.get())
        ctx.save_for_backward(*tensors)
        return function(*tensors)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        given, tpu, generator = ctx.saved_tensors, graphs(), GENERATOR.get()
        *again, gradient = torch.ops.tpu._optimization_barrier([*given, gradient])
        pairs = zip(again, given, strict=True)
        inputs = [new.detach().requires_grad_(old.requires_grad) for new, old in pairs]
        random_after = tpu.get_device_state_tensor(generator)
        tpu.set_device_state_tensor(generator, ctx.random)
        kind, dtype, casts = ctx.cast
        with torch.set_grad_enabled(True), torch.autocast(kind, dtype, enabled=casts):
            result = ctx.function(*inputs)
        tpu.set_device_state_tensor(generator, random_after)
        torch.autograd.backward(result, gradient)
        return None, *(tensor.grad for tensor in inputs)


def recomputed(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """`function(*tensors)` in a program that is being recorded, computed again for its gradient."""
    if not any(tensor.requires_grad for tensor in tensors):
        return function(*tensors)
    result: Tensor = Recomputation.apply(function, *tensors)  # type: ignore[no-untyped-call]
    return result
