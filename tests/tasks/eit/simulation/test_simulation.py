import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from tpukit.tasks.eit.generate import SimulatedData, noise_level, simulate
from tpukit.tasks.eit.simulation.forward import forward_model
from tpukit.tasks.eit.simulation.inclusions import (
    GAP,
    SHAPES,
    WALL,
    draw_image,
    draw_inclusions,
    mixture,
    negative_share,
    pixel_centres,
)

MEASURED = os.environ.get("TPUKIT_UEF2017")
SCALE = 1040.856


@pytest.mark.parametrize("shape", dict.fromkeys(SHAPES), ids=lambda shape: shape.__name__)
def test_shapes_stay_in_their_circle_and_have_an_inside(shape):
    for seed in range(30):
        level = shape(np.random.default_rng(seed), 0.3, (0.2, -0.4))
        points = pixel_centres()
        inside = level(points) < 0
        away = np.hypot(points[..., 0] - 0.2, points[..., 1] + 0.4)
        assert away[inside].max() <= 0.3 + 1e-9
        assert 0.05 < inside.sum() / (np.pi * (0.3 * 64) ** 2) <= 1.02


def test_objects_keep_their_distance():
    for seed in range(100):
        objects = draw_inclusions(np.random.default_rng(seed), "strong")
        assert 1 <= len(objects) <= 4
        for i, one in enumerate(objects):
            assert np.hypot(*one.centre) + one.radius <= WALL + 1e-9
            for other in objects[:i]:
                apart = np.hypot(*np.subtract(one.centre, other.centre))
                assert apart >= one.radius + other.radius + GAP


def test_share_of_cut_triangles_matches_counting():
    rng = np.random.default_rng(0)
    corners = rng.normal(size=(3, 40))
    a, b = rng.random((2, 200_000))
    folded = a + b > 1
    a, b = np.where(folded, 1 - a, a), np.where(folded, 1 - b, b)
    for column, share in zip(corners.T, negative_share(corners), strict=True):
        values = column[0] + a * (column[1] - column[0]) + b * (column[2] - column[0])
        assert share == pytest.approx((values < 0).mean(), abs=0.01)


@pytest.mark.parametrize("sigma", [0.01, 2.0, 30.0])
def test_mixture_lies_between_series_and_parallel(sigma):
    share = np.linspace(0, 1, 11)
    mixed = mixture(share, sigma)
    assert mixed[[0, -1]] == pytest.approx([1.0, sigma])
    assert (mixed >= 1 / (share / sigma + 1 - share) - 1e-12).all()
    assert (mixed <= share * sigma + 1 - share + 1e-12).all()


def test_a_sample_depends_on_settings_and_index_alone():
    settings = SimulatedData(seed=5)
    forwards = [simulate(settings, i) for i in range(6)]
    backwards = [simulate(settings, i) for i in reversed(range(6))][::-1]
    for one, other in zip(forwards, backwards, strict=True):
        np.testing.assert_array_equal(one.ys, other.ys)
        np.testing.assert_array_equal(one.xs, other.xs)
    assert (forwards[0].ys != forwards[1].ys).any()
    assert (simulate(SimulatedData(seed=6), 0).ys != forwards[0].ys).any()


def test_both_label_conventions_show_the_same_objects():
    for index in range(20):
        classes = simulate(SimulatedData(), index).xs
        difference = simulate(SimulatedData(labels="difference"), index).xs
        assert set(np.unique(classes[np.abs(classes) == 1])) <= {-1.0, 1.0}
        np.testing.assert_array_equal(np.sign(classes), np.sign(difference))
        assert difference.min() >= -0.99 and difference.max() <= 29
        inside = difference[classes == -1]
        assert ((inside >= -0.991) & (inside <= -0.969)).all()


def test_mild_contrast_stays_between_minus_1_and_1():
    settings = SimulatedData(labels="difference", contrast="mild")
    images = np.stack([simulate(settings, i).xs for i in range(50)])
    assert -1 < images.min() < -0.5
    assert 0.5 < images.max() <= 1


def test_labels_are_exact_in_half_precision():
    settings = SimulatedData(labels="difference")
    image = simulate(settings, 3).xs
    assert image.dtype == np.float32
    np.testing.assert_array_equal(image.astype(np.float16).astype(np.float32), image)


def test_noise_has_the_decibels_asked_for():
    quiet = SimulatedData(noise="200")
    loud = dataclasses.replace(quiet, noise="40")
    ratios = []
    for index in range(40):
        clean, noisy = simulate(quiet, index).ys, simulate(loud, index).ys
        ratios.append(20 * np.log10(np.linalg.norm(clean) / np.linalg.norm(noisy - clean)))
    assert np.mean(ratios) == pytest.approx(40, abs=0.3)
    assert noise_level(np.full(10, 2.0), 20.0) == pytest.approx(0.2)


def test_image_edges_are_one_pixel_soft():
    objects = draw_inclusions(np.random.default_rng(1), "strong")
    image = draw_image(objects, "classes")
    soft = (image != 0) & (np.abs(image) != 1)
    assert 0 < soft.sum() < 0.5 * (image != 0).sum()


def published_std():
    folder = os.environ.get("TPUKIT_EIT_NORMALISATION") or Path(MEASURED or ".").parent
    path = Path(folder) / "std.pth"
    if not path.exists():
        pytest.skip("needs the published std.pth: TPUKIT_EIT_NORMALISATION or beside UEF2017")
    return torch.load(path, weights_only=True).numpy().ravel()


def test_channels_vary_as_the_published_ones():
    std = published_std()
    settings = SimulatedData()
    voltages = np.stack([simulate(settings, i).ys for i in range(2000)])
    assert np.corrcoef(voltages.std(0), std)[0, 1] > 0.99


@pytest.mark.skipif(not MEASURED, reason="needs the measured frames: TPUKIT_UEF2017")
def test_orientation_stored_images_give_the_measured_voltages():
    model = forward_model(10.2)
    pixels = ((model.mesh.centroids * 64) + 63.5).round().astype(int)
    agreement, turned = [], []
    for path in sorted(Path(MEASURED).glob("*.npz")):
        with np.load(path) as frame:
            image, measured = frame["xs"], frame["ys"][:, 0] / SCALE
        for view, results in ((image, agreement), (image[:, ::-1], turned)):
            classes = view[pixels[:, 1], pixels[:, 0]]
            sigma = np.where(classes < -0.5, 0.01, np.where(classes > 0.5, 20.0, 1.0))
            results.append(np.corrcoef(model.change(sigma), measured)[0, 1])
    assert np.mean(agreement) > 0.95
    assert np.mean(turned) < 0.8
