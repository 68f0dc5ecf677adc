"""Boundary voltages: 208 numbers of 16 electrodes, as the network's map, turned and mirrored.

Layout after Shi, Kang, Liatsis (2025), doi 10.1109/TIM.2025.3550245, and its public code: row i of
the 16 x 16 map is the drive (i, i+1); its columns i-1, i, i+1 are zero. The network repeats each
entry to the image's size (`torch.nn.Upsample`'s default, nearest).

The symmetries are those of sixteen equal electrodes on a disk: quarter turns, and each of them
mirrored. The first electrode lies at the bottom of the image and the others counter-clockwise, as
in the published data; four electrodes further is a quarter turn of the image, pixel for pixel.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

ELECTRODES = 16
MEASUREMENTS = 13
"""Voltages a drive: the pairs that touch a driving electrode are left out."""
VOLTAGES = ELECTRODES * MEASUREMENTS
IMAGE_SIZE = 128

FloatArray = NDArray[np.floating[Any]]
QUARTER = ELECTRODES // 4
"""Electrodes of a quarter turn."""


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


@dataclass(frozen=True)
class Symmetry:
    """First mirrored left to right, then turned counter-clockwise."""

    quarter_turns: int = 0
    mirrored: bool = False

    @cached_property
    def _order(self) -> NDArray[np.int64]:
        """(208,): the measured voltage that takes the place of each."""
        drives, pairs = np.arange(ELECTRODES)[:, None], measured_pairs()
        grid = np.zeros((ELECTRODES, ELECTRODES), np.int64)
        grid[drives, pairs] = np.arange(VOLTAGES).reshape(pairs.shape)
        if self.mirrored:
            # The pair (j, j + 1) becomes (-j, -j - 1): two signs change, and the voltage's stays.
            grid = grid[::-1, ::-1]
        grid = np.roll(grid, (QUARTER * self.quarter_turns,) * 2, (0, 1))
        return grid[drives, pairs].ravel()

    def of_voltages(self, ys: NDArray[np.float32]) -> NDArray[np.float32]:
        """What the electrodes, (..., 208), would measure."""
        return ys[..., self._order]

    def of_images(self, images: NDArray[Any]) -> NDArray[Any]:
        """What the images, (..., side, side), would be."""
        mirrored = images[..., ::-1] if self.mirrored else images
        return np.rot90(mirrored, self.quarter_turns, (-2, -1))

    def undo(self, images: NDArray[Any]) -> NDArray[Any]:
        """The inverse of `of_images`."""
        turned = np.rot90(images, -self.quarter_turns, (-2, -1))
        return turned[..., ::-1] if self.mirrored else turned


SYMMETRIES = tuple(Symmetry(turns, mirrored) for mirrored in (False, True) for turns in range(4))
"""All eight; the first leaves everything as it is."""
