import os
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import pearsonr
from skimage.metrics import structural_similarity

from tpukit.tasks.eit.baseline import noser, tikhonov
from tpukit.tasks.eit.generate import SimulatedData, simulate
from tpukit.tasks.eit.metrics import (
    correlation,
    disk_mask,
    measure_all,
    pooled_rmse,
    psnr,
    rmse,
    ssim,
)

MEASURED = os.environ.get("TPUKIT_UEF2017")


@pytest.fixture(scope="module")
def pair():
    rng = np.random.default_rng(0)
    truth = np.stack([simulate(SimulatedData(), i).xs for i in range(4)])
    return truth + rng.normal(0, 0.2, truth.shape), truth


def test_correlation_is_pearsons_over_the_disk(pair):
    mask = disk_mask(128)
    expected = [pearsonr(x[mask], y[mask]).statistic for x, y in zip(*pair, strict=True)]
    np.testing.assert_allclose(correlation(*pair), expected)
    assert mask.sum() == pytest.approx(np.pi * 64**2, rel=3e-3)
    outside = pair[0] + 100 * ~mask
    np.testing.assert_allclose(correlation(outside, pair[1]), expected)


def test_correlation_of_a_constant_image_is_zero(pair):
    assert correlation(np.zeros_like(pair[1]), pair[1]).tolist() == [0.0] * 4


def test_rmse_and_psnr_as_published(pair):
    images, truth = pair
    expected = [np.sqrt(((a - b) ** 2).mean()) for a, b in zip(images, truth, strict=True)]
    np.testing.assert_allclose(rmse(images, truth), expected)
    pooled = np.sqrt(((images - truth) ** 2).mean())
    assert pooled_rmse(rmse(images, truth)) == pytest.approx(pooled)
    peaks = (truth / 2 + 0.5).max((1, 2))
    errors = (((images - truth) / 2) ** 2).mean((1, 2))
    np.testing.assert_allclose(psnr(images, truth), 10 * np.log10(peaks**2 / errors), rtol=1e-6)
    plastic = -np.abs(truth)
    assert psnr(plastic + 0.1, plastic)[0] == pytest.approx(20 * np.log10(0.5 / 0.05))


def test_ssim_is_that_of_scikit_image(pair):
    images, truth = (np.asarray(x, np.float64) for x in pair)
    expected = [
        structural_similarity(a, b, data_range=2.0) for a, b in zip(images, truth, strict=True)
    ]
    np.testing.assert_allclose(ssim(images, truth), expected, rtol=1e-6)


def test_every_metric_of_every_sample(pair):
    measured = measure_all(*pair)
    assert {name: values.shape for name, values in measured.items()} == dict.fromkeys(
        ("correlation", "rmse", "psnr", "ssim"), (4,)
    )


# -- baselines -------------------------------------------------------------------------------------


def test_baselines_find_simulated_objects():
    samples = [simulate(SimulatedData(seed=1), i) for i in range(60)]
    ys, xs = np.stack([s.ys for s in samples]), np.stack([s.xs for s in samples])
    for method, expected in ((tikhonov(), 0.7), (noser(), 0.74)):
        images = method.images(ys)
        assert images.shape == (60, 128, 128) and images.dtype == np.float32
        assert not images[:, ~disk_mask(128)].any()
        assert correlation(images, xs).mean() > expected
    np.testing.assert_allclose(method.images(ys[7]), images[7], rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not MEASURED, reason="needs the measured frames: TPUKIT_UEF2017")
def test_baselines_on_measured_frames():
    ys, xs = [], []
    for path in sorted(Path(MEASURED).glob("*.npz")):
        with np.load(path) as frame:
            ys.append(frame["ys"][:, 0] / 1040.856)
            xs.append(frame["xs"])
    for method, expected in ((tikhonov(), 0.71), (noser(), 0.755)):
        found = correlation(method.images(np.stack(ys)), np.stack(xs)).mean()
        assert found == pytest.approx(expected, abs=0.01)
