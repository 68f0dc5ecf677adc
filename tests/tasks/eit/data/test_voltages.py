"""Voltages as maps, and what turning or mirroring the tank does to them."""

import numpy as np
import pytest

from tpukit.tasks.eit.data.voltages import SYMMETRIES, measured_pairs, voltage_map
from tpukit.tasks.eit.simulation.forward import forward_model
from tpukit.tasks.eit.simulation.inclusions import mixture, negative_share, pixel_centres


def test_pairs_rise_and_leave_out_those_that_touch_the_drive():
    pairs = measured_pairs()
    assert pairs.shape == (16, 13)
    assert pairs[0].tolist() == list(range(2, 15))
    assert pairs[5].tolist() == [0, 1, 2, 3, 7, 8, 9, 10, 11, 12, 13, 14, 15]
    assert pairs[15].tolist() == list(range(1, 14))


def test_map_has_zeros_around_the_diagonal_and_the_voltages_in_order():
    ys = np.arange(1, 209, dtype=np.float32)[:, None]
    image = voltage_map(ys, np.zeros((1, 16, 13)), np.ones((1, 16, 13)))
    assert image.dtype == np.float32
    for i in range(16):
        assert np.flatnonzero(image[i] == 0).tolist() == sorted((i + k) % 16 for k in (-1, 0, 1))
        assert image[i][image[i] != 0].tolist() == ys[13 * i : 13 * i + 13, 0].tolist()


def test_map_normalises_each_channel():
    rng = np.random.default_rng(0)
    ys, mean, std = rng.normal(size=(5, 208)), rng.normal(size=208), rng.uniform(1, 2, 208)
    maps = voltage_map(ys, mean, std)
    assert maps.shape == (5, 16, 16)
    drives = np.arange(16)[:, None]
    kept = maps[:, drives, measured_pairs()].reshape(5, 208)
    np.testing.assert_allclose(kept * std + mean, ys, atol=1e-6)
    assert maps[2, 0, 2] == np.float32((ys[2, 0] - mean[0]) / std[0])


SIDE = 128


def simulated(x, y):
    """The image and the voltages of a metal disk at (x, y), y down."""

    def inside(points):
        return np.linalg.norm(points - (x, y), axis=-1) - 0.25

    model = forward_model(10.2)
    sigma = mixture(negative_share(inside(model.mesh.nodes)[model.mesh.triangles.T]), 20.0)
    image = (inside(pixel_centres(SIDE)).reshape(SIDE, SIDE) < 0).astype(np.float32)
    return image, model.change(sigma)


@pytest.mark.parametrize("symmetry", SYMMETRIES, ids=str)
def test_the_object_that_is_turned_measures_the_turned_voltages(symmetry):
    image, voltages = simulated(0.2, 0.5)
    turned = symmetry.of_images(image)
    row, column = (places.mean() for places in np.nonzero(turned))
    expected, others = simulated((column - 63.5) / 64, (row - 63.5) / 64)
    assert np.abs(turned - expected).mean() < 1e-3
    error = np.linalg.norm(symmetry.of_voltages(voltages) - others) / np.linalg.norm(others)
    assert error < 0.03


def test_all_eight_differ_and_are_undone():
    image, voltages = simulated(0.2, 0.5)
    made = {symmetry.of_images(image).tobytes() for symmetry in SYMMETRIES}
    measured = {symmetry.of_voltages(voltages).tobytes() for symmetry in SYMMETRIES}
    assert len(made) == len(measured) == 8
    for symmetry in SYMMETRIES:
        np.testing.assert_array_equal(symmetry.undo(symmetry.of_images(image)), image)
