"""Resizing and adaptive pooling as one matrix an axis, for torch_xla, which has neither in full.

All of them are linear and work on one axis after the other, so torch itself gives the matrix of an
axis: what it makes of a unit matrix on the CPU. The gradient is the transposed matrix. A TPU is
good at matrices and bad at gathers.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

NEAREST = [f"{kind}{n}d" for kind in ("upsample_nearest", "_upsample_nearest_exact")
           for n in (1, 2, 3)]  # fmt: skip
SMOOTH = ["upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d",
          "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"]  # fmt: skip
POOLS = ["_adaptive_avg_pool2d", "_adaptive_avg_pool3d"]
RESIZES = {name: int(name.removesuffix("_aa")[-2]) for name in (*NEAREST, *SMOOTH, *POOLS)}
"""Each operator with its number of axes."""


def resize(name: str, image: Tensor, output_size: Sequence[int], *options: Any) -> Tensor:
    """The operator `name` of an image (..., *sizes)."""
    matrices = _matrices(name, image.shape, output_size, options)
    for axis, matrix in enumerate(matrices, start=-len(matrices)):
        image = _along(axis, image, matrix)
    return image


def resize_backward(
    name: str, gradient: Tensor, size: Any, input_size: Sequence[int] = (), *options: Any
) -> Tensor:
    """The gradient of `name`. A pool is given its input, the others the sizes after and before."""
    before, after = (size.shape, gradient.shape) if name in POOLS else (input_size, size)
    matrices = _matrices(name, before, after, options)
    for axis, matrix in enumerate(matrices, start=-len(matrices)):
        gradient = _along(axis, gradient, matrix.T)
    return gradient


def pool_backward(
    gradient: Tensor, before: Sequence[int], kernel: Sequence[int], stride: Sequence[int],
    padding: Sequence[int], *, include_pad: bool,
) -> Tensor:  # fmt: skip
    """The gradient of torch's avg_pool2d with ceil_mode, of an image of the sizes `before`."""
    stride = stride or kernel
    for axis in (-2, -1):
        window = kernel[axis], stride[axis], padding[axis]
        gradient = _along(axis, gradient, _pool_matrix(before[axis], *window, include_pad).T)
    return gradient


def windows(before: int, after: int) -> list[tuple[int, int]]:
    """Where each window of an adaptive pool starts and ends."""
    return [(i * before // after, -(-(i + 1) * before // after)) for i in range(after)]


@functools.lru_cache(maxsize=256)
def _pool_matrix(
    before: int, kernel: int, stride: int, padding: int, include_pad: bool
) -> Tensor:  # fmt: skip
    units = torch.eye(before).reshape(1, before, 1, before)
    made = torch.nn.functional.avg_pool2d(
        units, (1, kernel), (1, stride), (0, padding), True, include_pad
    )
    return made.reshape(before, -1).T.contiguous()


def _matrices(
    name: str, before: Sequence[int], after: Sequence[int], options: Sequence[Any]
) -> list[Tensor]:
    """Of each axis (its size after, its size before)."""
    axes = RESIZES[name]
    align, scales = options[: name in SMOOTH], options[name in SMOOTH :] or [None] * axes
    each = zip(before[-axes:], after[-axes:], scales, strict=True)
    return [_matrix(name, axes, *axis, align) for axis in each]


@functools.lru_cache(maxsize=256)
def _matrix(
    name: str, axes: int, before: int, after: int, scale: float | None, align: tuple[Any, ...]
) -> Tensor:
    """What torch makes of the unit vectors of one axis (after, before), on the CPU."""
    # As the last axis: on the first, beside sizes of 1, torch's antialiasing is wrong.
    others = [1] * (axes - 1)
    units = torch.eye(before).reshape(1, before, *others, before)
    scales = [] if name in POOLS else [*[None] * (axes - 1), scale]
    made: Tensor = getattr(torch.ops.aten, name)(units, [*others, after], *align, *scales)
    return made.reshape(before, after).T.contiguous()


def _along(axis: int, image: Tensor, matrix: Tensor) -> Tensor:
    """The matrix applied to one axis; repeating values and adding them up need none."""
    after, before = matrix.shape
    if after % before == 0 and torch.equal(matrix, _repetition(before, after)):
        return image.repeat_interleave(after // before, axis)
    if before % after == 0 and torch.equal(matrix, _repetition(after, before).T):
        return torch.unflatten(image, axis, (after, -1)).sum(axis)
    weights = matrix.to(image.device, image.dtype)
    return (image.transpose(axis, -1) @ weights.T).transpose(axis, -1)


def _repetition(size: int, repeated: int) -> Tensor:
    return torch.eye(size).repeat_interleave(repeated // size, 0)
