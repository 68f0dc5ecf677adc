"""Boundary voltages as the network's condition: 208 voltages -> 16 x 13 -> a 16 x 16 map.

Layout after Shi, Kang, Liatsis (2025), doi 10.1109/TIM.2025.3550245, and its public code: row i is
the drive (i, i+1); its columns i-1, i, i+1 are zero. The network repeats each entry to the image's
size (`torch.nn.Upsample`'s default, nearest).

A sample of `tpukit.tasks.eit.data.dataset.EITDataset` is
`{"voltages": (1, 16, 16) float32, "image": (1, image_size, image_size) float32}`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

ELECTRODES = 16
MEASUREMENTS = 13
"""Voltages a drive: the pairs that touch a driving electrode are left out."""
VOLTAGES = ELECTRODES * MEASUREMENTS
IMAGE_SIZE = 128

FloatArray = NDArray[np.floating[Any]]


def measured_pairs() -> NDArray[np.int64]:
    """(16, 13): for each drive i the rising j of its measured pairs (j, j+1)."""
    pairs = np.arange(ELECTRODES)
    return np.array(
        [[j for j in pairs if (j - i) % ELECTRODES not in {0, 1, ELECTRODES - 1}] for i in pairs]
    )


_FLAT_POSITIONS = (np.arange(ELECTRODES)[:, None] * ELECTRODES + measured_pairs()).ravel()


def voltage_map(ys: FloatArray, mean: FloatArray, std: FloatArray) -> NDArray[np.float32]:
    """The normalised voltages as maps.

    `ys`: (..., 208), or (..., 208, 1) as files hold them; `mean` and `std`: 208 values of any shape
    (published: (1, 16, 13)). Returns (..., 16, 16), float32.
    """
    voltages = np.asarray(ys)
    if voltages.shape[-1] == 1:
        voltages = voltages[..., 0]
    normalised = (voltages - np.reshape(mean, -1)) / np.reshape(std, -1)
    maps = np.zeros((*voltages.shape[:-1], ELECTRODES * ELECTRODES), np.float32)
    maps[..., _FLAT_POSITIONS] = normalised
    return maps.reshape(*voltages.shape[:-1], ELECTRODES, ELECTRODES)
