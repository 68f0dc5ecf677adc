"""The symmetries of sixteen equal electrodes on a disk: quarter turns, and each of them mirrored.

The first electrode lies at the bottom of the image and the others counter-clockwise, as in the
published data; four electrodes further is a quarter turn of the image, pixel for pixel.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tpukit.tasks.eit.data.conditioning import ELECTRODES, VOLTAGES, measured_pairs

Floats = NDArray[np.float32]
QUARTER = ELECTRODES // 4
"""Electrodes of a quarter turn."""


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

    def of_voltages(self, ys: Floats) -> Floats:
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
