"""Ridge regression of images on voltages, in closed form: where the smaller networks start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tpukit.train.task import SampleSource

Floats = NDArray[np.floating[Any]]
RIDGE = 1e-2
"""Added to the diagonal of the normalised voltages' second moments, whose own is 1."""
MAX_SAMPLES = 2000
"""More change the fit little: it has 208 inputs."""


@dataclass(frozen=True, eq=False)
class RidgeFit:
    """image = weight @ voltages + bias."""

    weight: NDArray[np.float32]
    """(pixels, map entries)."""
    bias: NDArray[np.float32]
    """(pixels,)."""


def fit_images(data: SampleSource, side: int) -> RidgeFit:
    """Ridge regression of images, averaged down to side x side, on flattened voltage maps."""
    chosen = np.unique(np.linspace(0, len(data) - 1, min(len(data), MAX_SAMPLES)).astype(int))
    samples = [data[int(index)] for index in chosen]
    maps = np.stack([np.ravel(sample["voltages"]) for sample in samples])
    images = np.stack([shrunk(sample["image"][0], side).ravel() for sample in samples])
    return ridge_regression(maps.astype(np.float64), images)


def ridge_regression(inputs: Floats, outputs: Floats) -> RidgeFit:
    """Least squares with a penalty of `RIDGE` on the weights of centred inputs."""
    mean_in, mean_out = inputs.mean(0), outputs.mean(0)
    centred = inputs - mean_in
    moments = centred.T @ centred / len(inputs) + RIDGE * np.eye(inputs.shape[1])
    weight = np.linalg.solve(moments, centred.T @ (outputs - mean_out) / len(inputs)).T
    bias = mean_out - weight @ mean_in
    return RidgeFit(weight.astype(np.float32), bias.astype(np.float32))


def shrunk(image: Floats, side: int) -> Floats:
    """A square image averaged over equal cells down to side x side."""
    cell = image.shape[0] // side
    smaller: Floats = image.reshape(side, cell, side, cell).mean((1, 3))
    return smaller
