"""Linear maps of many tokens on a processor with AVX512-BF16, where no gradient is wanted.

Weights are packed from float32 as they are met, a bias costs nothing, and what lies between a
perceptron's two maps stays in the cache. Where the kernel does not apply, None is returned.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor, nn

from tpukit.hardware.cpu_kernels import kernel

NAME = "cpu_linear"
PANEL = 64
"""Widths are multiples of this."""
FEWEST_ROWS = 2048
"""Below this, packing the weights takes as long as the pass saves."""


def linear(x: Tensor, linear_map: nn.Linear) -> Tensor | None:
    """See `ModelOps.linear`; x and the result are bf16."""
    library = kernel(NAME) if _suits(x, linear_map) else None
    if library is None:
        return None
    result = x.new_empty(*x.shape[:-1], linear_map.out_features)
    library.linear(*_sizes(x, linear_map), *_addresses(x, linear_map, result), _threads())
    return result


def silu_mlp(x: Tensor, first: nn.Linear, second: nn.Linear) -> Tensor | None:
    """See `ModelOps.silu_mlp`; x and the result are bf16."""
    square = first.in_features == second.out_features
    library = kernel(NAME) if square and _suits(x, first, second) else None
    if library is None:
        return None
    result = torch.empty_like(x)
    library.silu_mlp(*_sizes(x, first), *_addresses(x, first, second, result), _threads())
    return result


def _suits(x: Tensor, *maps: nn.Linear) -> bool:
    return (
        not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and x.device.type == "cpu"
        and x.dtype == torch.bfloat16
        and x.is_contiguous()
        and x.numel() >= FEWEST_ROWS * x.shape[-1]
        and all(_packs(one) for one in maps)
    )


def _packs(one: nn.Linear) -> bool:
    return (
        one.bias is not None
        and all(t.dtype == torch.float32 and t.is_contiguous() for t in (one.weight, one.bias))
        and one.in_features % PANEL == one.out_features % PANEL == 0
    )


def _sizes(x: Tensor, one: nn.Linear) -> tuple[ctypes.c_int64, ...]:
    sizes = (x.numel() // one.in_features, one.in_features, one.out_features)
    return tuple(map(ctypes.c_int64, sizes))


def _addresses(x: Tensor, *rest: nn.Linear | Tensor) -> list[ctypes.c_void_p]:
    tensors = [x]
    for one in rest:
        tensors += [one] if isinstance(one, Tensor) else [one.weight, one.bias]
    return [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]


def _threads() -> int:
    return torch.get_num_threads()
