"""Turned and mirrored measurements against the simulation of turned and mirrored objects."""

import numpy as np
import pytest

from tpukit.tasks.eit.data.symmetry import SYMMETRIES
from tpukit.tasks.eit.simulation.forward import forward_model
from tpukit.tasks.eit.simulation.inclusions import mixture, negative_share, pixel_centres

SIDE = 128


def simulated(x, y):
    """The image and the voltages of a metal disk at (x, y), y down."""

    def inside(points):
        return np.linalg.norm(points - (x, y), axis=-1) - 0.25

    model = forward_model(10.2)
    sigma = mixture(negative_share(inside(model.mesh.nodes)[model.mesh.corners]), 20.0)
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
