"""Which values of a state no run can go on with."""

from collections.abc import Collection, Iterable

import torch
from torch import Tensor


def first_not_finite(
    tensors: Iterable[tuple[str, str, Tensor]], trained: Collection[str], allowed: Collection[str]
) -> str | None:
    """The first tensor of (file, name, tensor) with a value that no run can go on with, if any.

    NaN is none; infinities are meant in buffers (masks) and in an optimizer's state, but not in
    trained parameters. `allowed`: names of what may hold anything.
    """
    for file, key, tensor in tensors:
        name = key.split("/")[1] if file == "optimizer" else key
        if name in allowed or not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        ends = _ends(tensor)
        strict = file != "optimizer" and name in trained
        if ends.isnan().any() or (strict and ends.isinf().any()):
            return f"{key} of {file} holds {'nan' if ends.isnan().any() else 'inf'}"
    return None


def is_finite(tensor: Tensor) -> bool:
    """Whether no value is NaN or infinite; of numbers that are not floats, yes."""
    is_float = tensor.is_floating_point() or tensor.is_complex()
    return not is_float or bool(_ends(tensor.detach()).isfinite().all())


def _ends(tensor: Tensor) -> Tensor:
    """The smallest and the largest value, in one pass; NaN where there is one."""
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if not values.numel():
        return torch.zeros(2)
    if values.element_size() == 1:  # of 8-bit floats torch knows no order
        values = values.float()
    return torch.stack(torch.aminmax(values)).float()
