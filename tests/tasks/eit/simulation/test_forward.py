"""The mesh and the forward model against analytic and other solvers' answers."""

import numpy as np
import pytest
from scipy import sparse
from scipy.sparse.linalg import splu

from tpukit.tasks.eit.data.voltages import measured_pairs
from tpukit.tasks.eit.simulation.forward import (
    CONTACT_IMPEDANCE,
    CURRENT_AMPERE,
    disk_mesh,
    drive_currents,
    forward_model,
    measure_drives,
)
from tpukit.tasks.eit.simulation.inclusions import (
    draw_inclusions,
    mixture,
    negative_share,
    sigma_on,
)


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


def concentric(radius, sigma, degrees=10.2, panels=24, harmonics=3000):
    """Voltages of a concentric disk in closed form: Fourier series, constant current densities on
    `panels` parts of each electrode."""
    width = np.deg2rad(degrees) / panels
    offsets = (np.arange(panels) + 0.5) * width - np.deg2rad(degrees) / 2
    centres = (np.arange(16)[:, None] * np.pi / 8 + offsets).ravel()
    n = np.arange(1, harmonics + 1)
    mu = (1 - sigma) / (1 + sigma) * radius ** (2.0 * n)
    response = (1 + mu) / (1 - mu) / n
    weights = np.sinc(n * width / 2 / np.pi) * np.sqrt(response * width / np.pi)
    waves = np.concatenate([np.cos(np.outer(centres, n)), np.sin(np.outer(centres, n))], axis=1)
    waves *= np.tile(weights, 2)
    count = len(centres)
    matrix = np.zeros((count + 17, count + 17))
    electrodes = np.repeat(np.eye(16), panels, axis=0)
    matrix[:count, :count] = waves @ waves.T + CONTACT_IMPEDANCE * np.eye(count)
    matrix[:count, count : count + 16] = -electrodes
    matrix[count : count + 16, :count] = width * electrodes.T
    matrix[:count, -1] = 1
    matrix[-1, count : count + 16] = 1
    right = np.zeros((count + 17, 16))
    right[count : count + 16] = drive_currents()
    return measure_drives(np.linalg.solve(matrix, right)[count : count + 16])


@pytest.fixture(scope="module")
def background():
    return concentric(0.5, 1.0)


def background_of(model):
    return measure_drives(model.background[-16:])


def disk_sigma(mesh, radius, sigma):
    outside = np.linalg.norm(mesh.nodes, axis=1) - radius
    return mixture(negative_share(outside[mesh.triangles.T]), sigma)


def relative(found, expected):
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


def test_background_matches_analysis(background):
    assert relative(background_of(forward_model(10.2)), background) < 0.008


@pytest.mark.parametrize("radius", [0.25, 0.4, 0.55, 0.7])
@pytest.mark.parametrize("sigma", [0.01, 0.3, 2.0, 20.0])
def test_concentric_object_matches_analysis(background, radius, sigma):
    model = forward_model(10.2)
    found = model.change(disk_sigma(model.mesh, radius, sigma))
    assert relative(found, concentric(radius, sigma) - background) < 0.017


def test_voltages_have_the_published_sign():
    model = forward_model(10.2)
    assert background_of(model).min() > 0
    resistive = model.change(disk_sigma(model.mesh, 0.5, 0.01))
    assert (resistive > 0).mean() > 0.6
    conductive = model.change(disk_sigma(model.mesh, 0.5, 20.0))
    assert (conductive < 0).mean() > 0.6
    assert resistive @ conductive < 0


def random_sigma(model, index):
    return sigma_on(model.mesh, draw_inclusions(np.random.default_rng(index), "strong"))


@pytest.mark.parametrize("degrees", [10.2, 4.0])
def test_reciprocity(degrees):
    model = forward_model(degrees)
    sigmas = [np.ones(len(model.mesh.triangles)), random_sigma(model, 3)]
    for sigma in sigmas:
        square = np.zeros((16, 16))
        voltages = (background_of(model) + model.change(sigma)).reshape(16, 13)
        np.put_along_axis(square, measured_pairs(), voltages, axis=1)
        assert np.abs(square - square.T).max() < 2e-13 * np.abs(square).max()


def test_nothing_in_the_tank_changes_nothing():
    model = forward_model(10.2)
    assert not model.change(np.ones(len(model.mesh.triangles))).any()


def test_jacobian_matches_finite_differences():
    model = forward_model(10.2)
    jacobian = model.jacobian()
    step = 1e-4
    for triangle in np.random.default_rng(0).choice(jacobian.shape[1], 25, replace=False):
        up, down = np.ones((2, jacobian.shape[1]))
        up[triangle] += step
        down[triangle] -= step
        numeric = (model.change(up) - model.change(down)) / (2 * step)
        analytic = jacobian[:, triangle]
        assert np.abs(numeric - analytic).max() < 6e-6 * np.abs(analytic).max()


def skfem_changes(refinement, samples):
    """The same model by scikit-fem's assembly and a sparse factorisation a sample."""
    skfem = pytest.importorskip("skfem")
    from skfem.helpers import dot, grad

    mesh = disk_mesh(10.2, refinement)
    grid = skfem.MeshTri(mesh.nodes.T, mesh.triangles.T)
    inside = skfem.Basis(grid, skfem.ElementTriP1())
    per_triangle = inside.with_element(skfem.ElementTriP0())

    @skfem.BilinearForm
    def conduction(u, v, w):
        return w.sigma * dot(grad(u), grad(v))

    mass = skfem.BilinearForm(lambda u, v, w: u * v)
    load = skfem.LinearForm(lambda v, w: v)
    nodes = len(mesh.nodes)
    contact, columns, lengths = sparse.csr_matrix((nodes, nodes)), [], []
    for edges in mesh.electrode_edges:
        pairs = {tuple(sorted(edge)) for edge in edges.tolist()}
        facets = [f for f, pair in enumerate(np.sort(grid.facets.T, 1).tolist())
                  if tuple(pair) in pairs]  # fmt: skip
        basis = skfem.FacetBasis(grid, skfem.ElementTriP1(), facets=np.array(facets))
        contact = contact + mass.assemble(basis) / CONTACT_IMPEDANCE
        columns.append(-load.assemble(basis) / CONTACT_IMPEDANCE)
        lengths.append(-columns[-1].sum())
    corner = sparse.csr_matrix(np.diag(lengths) + 1 / 16)
    border = sparse.csr_matrix(np.array(columns).T)
    right = np.zeros((nodes + 16, 16))
    right[nodes:] = drive_currents()

    def voltages(sigma):
        field = per_triangle.interpolate(sigma)
        stiffness = conduction.assemble(inside, sigma=field) + contact
        system = sparse.bmat([[stiffness, border], [border.T, corner]], format="csc")
        return measure_drives(splu(system).solve(right)[nodes:])

    empty = voltages(np.ones(len(mesh.triangles)))
    sigmas = [sigma_on(mesh, draw_inclusions(np.random.default_rng(i), "strong")) for i in samples]
    return np.array([voltages(sigma) - empty for sigma in sigmas])


def test_equals_scikit_fem_on_the_same_mesh():
    model = forward_model(10.2)
    expected = skfem_changes(1, range(4))
    found = np.array([model.change(random_sigma(model, i)) for i in range(4)])
    assert np.abs(found - expected).max() < 1e-9 * np.abs(expected).max()


def test_converges_with_the_mesh():
    """About 1,600 against 14,000 nodes."""
    model = forward_model(10.2)
    samples = range(4)
    fine = skfem_changes(3, samples)
    coarse = np.array([model.change(random_sigma(model, i)) for i in samples])
    assert np.corrcoef(coarse.ravel(), fine.ravel())[0, 1] > 0.9994


def test_current_is_a_milliampere():
    assert CURRENT_AMPERE == 1e-3
    assert drive_currents().sum(0).tolist() == [0.0] * 16
    assert drive_currents()[[3, 4], 3].tolist() == [1e-3, -1e-3]
