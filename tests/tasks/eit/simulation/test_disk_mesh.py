import numpy as np
import pytest

from tpukit.tasks.eit.simulation.disk_mesh import disk_mesh


@pytest.mark.parametrize("degrees", [10.2, 4.0])
def test_mesh_fills_the_disk_with_good_triangles(degrees):
    mesh = disk_mesh(degrees)
    assert 1200 < len(mesh.nodes) < 1800
    assert mesh.areas.min() > 0
    assert mesh.areas.sum() == pytest.approx(np.pi, rel=1e-3)
    assert len(np.unique(mesh.triangles)) == len(mesh.nodes)
    sides = mesh.nodes[mesh.triangles]
    lengths = np.linalg.norm(sides - np.roll(sides, 1, axis=1), axis=-1)
    quality = 4 * np.sqrt(3) * mesh.areas / (lengths**2).sum(1)
    assert quality.min() > 0.35
    assert quality.mean() > 0.9


@pytest.mark.parametrize("degrees", [10.2, 4.0])
def test_electrodes_have_their_width_and_place(degrees):
    mesh = disk_mesh(degrees)
    for k in range(16):
        ends = mesh.nodes[mesh.electrode_edges[k]]
        angles = np.arctan2(ends[..., 0], ends[..., 1]) - k * np.pi / 8
        angles = np.degrees((angles + np.pi) % (2 * np.pi) - np.pi)
        assert angles.min() == pytest.approx(-degrees / 2)
        assert angles.max() == pytest.approx(degrees / 2)


def test_electrode_0_is_at_the_bottom_and_4_at_the_right():
    mesh = disk_mesh(10.2)
    centres = mesh.nodes[mesh.electrode_edges].mean((1, 2))
    np.testing.assert_allclose(centres[[0, 4]], [[0, 1], [1, 0]], atol=0.02)


def test_gradients_are_exact_for_linear_functions():
    mesh = disk_mesh(10.2)
    values = (2 * mesh.nodes[:, 0] - 3 * mesh.nodes[:, 1])[mesh.triangles]
    slopes = np.einsum("tk,tkd->td", values, mesh.gradients)
    np.testing.assert_allclose(slopes, np.broadcast_to([2.0, -3.0], slopes.shape), atol=1e-10)


def test_refinement_quadruples_the_nodes():
    assert 3.5 < len(disk_mesh(10.2, 2).nodes) / len(disk_mesh(10.2).nodes) < 4.5
