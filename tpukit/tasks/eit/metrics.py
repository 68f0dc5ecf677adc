"""How close an image is to the truth, per sample.

Images are (n, 128, 128); each metric is (n,).
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import uniform_filter

Images = NDArray[np.floating[Any]]
Values = NDArray[np.float64]

SSIM_WINDOW = 7
SSIM_RANGE = 2.0
"""Images lie in -1..1."""


def disk_mask(size: int) -> NDArray[np.bool_]:
    """(size, size): pixels whose centre lies in the tank."""
    steps = (np.arange(size) - (size - 1) / 2) / (size / 2)
    mask: NDArray[np.bool_] = steps[:, None] ** 2 + steps**2 <= 1.0
    return mask


def correlation(images: Images, truth: Images) -> Values:
    """Pearson's correlation over the disk's pixels; 0 where either image is constant."""
    mask = disk_mask(truth.shape[-1])
    first, second = (np.asarray(x, np.float64)[:, mask] for x in (images, truth))
    first = first - first.mean(1, keepdims=True)
    second = second - second.mean(1, keepdims=True)
    lengths = np.sqrt((first**2).sum(1) * (second**2).sum(1))
    products = (first * second).sum(1)
    values: Values = np.divide(products, lengths, out=np.zeros(len(lengths)), where=lengths > 0)
    return values


def rmse(images: Images, truth: Images) -> Values:
    """Root mean squared error over the whole image."""
    errors = np.asarray(images, np.float64) - truth
    values: Values = np.sqrt((errors**2).mean((1, 2)))
    return values


def pooled_rmse(values: Values) -> float:
    """One root over all frames together, as the public code reports it, of each frame's RMSE."""
    return float(np.sqrt(np.mean(values**2)))


def psnr(images: Images, truth: Images) -> Values:
    """Peak signal to noise in dB, as published: on x/2 + 1/2, the peak that of the truth.

    (Shi, Kang and Liatsis' code; an image without metal has its peak at 1/2, not 1.)
    """
    first, second = (np.asarray(x, np.float64) / 2 + 0.5 for x in (images, truth))
    peak = second.max((1, 2))
    errors = ((first - second) ** 2).mean((1, 2))
    values: Values = 10 * np.log10(peak**2 / (errors + 1e-12))
    return values


def ssim(images: Images, truth: Images) -> Values:
    """Structural similarity (Wang et al., 2004, doi 10.1109/TIP.2003.819861).

    Even windows of 7 x 7, data range 2: what `skimage.metrics.structural_similarity` gives.
    """
    pairs = zip(np.asarray(images, np.float64), np.asarray(truth, np.float64), strict=True)
    return np.array([_ssim(one, other) for one, other in pairs])


def _ssim(x: Values, y: Values) -> float:
    pixels = SSIM_WINDOW**2
    unbiased = pixels / (pixels - 1)
    ux, uy = (uniform_filter(image, SSIM_WINDOW) for image in (x, y))
    vx = unbiased * (uniform_filter(x * x, SSIM_WINDOW) - ux * ux)
    vy = unbiased * (uniform_filter(y * y, SSIM_WINDOW) - uy * uy)
    vxy = unbiased * (uniform_filter(x * y, SSIM_WINDOW) - ux * uy)
    c1, c2 = (0.01 * SSIM_RANGE) ** 2, (0.03 * SSIM_RANGE) ** 2
    similarity = ((2 * ux * uy + c1) * (2 * vxy + c2)) / ((ux**2 + uy**2 + c1) * (vx + vy + c2))
    edge = SSIM_WINDOW // 2
    return float(similarity[edge:-edge, edge:-edge].mean())


METRICS: Mapping[str, Callable[[Images, Images], Values]] = {
    metric.__name__: metric for metric in (correlation, rmse, psnr, ssim)
}
RANGES = {"correlation": (-1.0, 1.0), "rmse": (0.0, math.inf), "ssim": (-1.0, 1.0)}
"""Least and largest value of the metrics that have them."""


def measure_all(images: Images, truth: Images) -> dict[str, Values]:
    """Every metric of every sample."""
    return {name: metric(images, truth) for name, metric in METRICS.items()}
