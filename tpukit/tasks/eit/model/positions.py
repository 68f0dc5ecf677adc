"""Fixed position codes, and the order in which tokens lie."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LONGEST_PERIOD = 10_000.0


def sine_cosine_grid(width: int, grid: int) -> Tensor:
    """Position codes of a square grid, (grid * grid, width), rows first.

    The first half of a code is for the column, the second for the row; each is sines, then
    cosines, of width / 4 frequencies (He et al., Masked Autoencoders, 2022).
    """
    rates = LONGEST_PERIOD ** -(np.arange(width // 4, dtype=np.float64) / (width / 4))
    angles = np.arange(grid, dtype=np.float64)[:, None] * rates
    line = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    column = np.broadcast_to(line[None, :, :], (grid, grid, width // 2))
    row = np.broadcast_to(line[:, None, :], (grid, grid, width // 2))
    codes = np.concatenate([column, row], axis=2).reshape(grid * grid, width)
    return torch.from_numpy(codes).float()


def time_frequencies(count: int) -> Tensor:
    """Angular rates (count,) of a diffusion time's code, from 1 down towards 1 / LONGEST_PERIOD."""
    return torch.exp(-math.log(LONGEST_PERIOD) * torch.arange(count, dtype=torch.float32) / count)


def quadrant_order(grid: int) -> NDArray[np.int64]:
    """Row-major indices of a square grid, (grid * grid,), in the order of nested quadrants.

    In this order each 2x2 cell, 4x4 cell, ... is one run of tokens, so that merging cells,
    repeating them and cutting windows are reshapes. Within a cell: (0, 0), (1, 0), (0, 1), (1, 1)
    as (row, column), the order in which published patch merging stacks them. `grid` is a power
    of two.
    """
    position = np.arange(grid * grid)
    row = np.zeros_like(position)
    column = np.zeros_like(position)
    for bit in range(grid.bit_length() - 1):
        row |= ((position >> (2 * bit)) & 1) << bit
        column |= ((position >> (2 * bit + 1)) & 1) << bit
    return row * grid + column


def inverse_order(order: NDArray[np.int64]) -> NDArray[np.int64]:
    """The permutation that undoes `order`."""
    inverse = np.empty_like(order)
    inverse[order] = np.arange(len(order))
    return inverse


def relative_positions(window: int) -> Tensor:
    """Index of each (query, key) pair's offset, (window^2, window^2), rows first.

    Offsets (row, column) of query minus key, each shifted to start from 0, number a table of
    (2 window - 1)^2 rows (Liu et al., Swin Transformer, 2021).
    """
    place = torch.arange(window)
    row = place.repeat_interleave(window)
    column = place.repeat(window)
    rows = row[:, None] - row[None, :] + window - 1
    columns = column[:, None] - column[None, :] + window - 1
    return rows * (2 * window - 1) + columns
