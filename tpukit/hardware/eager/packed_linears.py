"""Linear layers over weights that oneDNN has packed for them: on a CPU, while no weight changes.

A product of a few rows with a matrix spends its time on reading the matrix; in the order that
oneDNN's own product wants it a step of GPT-2 takes half the time (docs/performance.md). The two
operators are those that torch.compile writes for a frozen model; they have no public name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


def can_pack() -> bool:
    """Whether this build of torch has oneDNN and its operators on packed weights."""
    operators = ("_reorder_linear_weight", "_linear_pointwise")
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available and all(hasattr(torch.ops.mkldnn, name) for name in operators)


class PackedLinears(TorchFunctionMode):
    """Inside, fp32 `F.linear` without gradients multiplies by a packed copy of its weight.

    A weight is packed at its first use, and again where it was changed in between; the copies take
    as much memory as the weights and go with this object.
    """

    def __init__(self) -> None:
        super().__init__()
        self._packed: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is F.linear and not kwargs and not _differentiated() and are_plain(*args):
            return self._multiply(*args)
        return func(*args, **(kwargs or {}))

    def _multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._pack(weight), bias, "none", [], ""
        )
        return product

    def _pack(self, weight: Tensor) -> Tensor:
        key = (weight.data_ptr(), weight.shape, weight._version)
        if key not in self._packed:
            plain = weight.detach()
            # Held as well, so that no other tensor comes to lie at this address.
            self._packed[key] = plain, torch.ops.mkldnn._reorder_linear_weight(plain)
        return self._packed[key][1]


def are_plain(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether a product is of whole fp32 tensors of the CPU."""
    tensors = [x, weight] if bias is None else [x, weight, bias]
    whole = all(
        type(t) in (Tensor, nn.Parameter) and t.dtype is torch.float32 and t.device.type == "cpu"
        for t in tensors
    )
    return whole and weight.ndim == 2 and weight.is_contiguous() and x.numel() > 0


def _differentiated() -> bool:
    return torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")
