"""The complete electrode model on a mesh of the unit disk.

Somersalo, Cheney, Isaacson (1992), doi 10.1137/0152060; linear triangles, one banded system a
conductivity. The mesh's boundary resolves the 16 electrodes. Coordinates are the image's: x to the
right, y down, so electrode k sits at (sin 22.5k deg, cos 22.5k deg): electrode 0 at the bottom
centre, then counter-clockwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solveh_banded
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import reverse_cuthill_mckee
from scipy.spatial import Delaunay

from tpukit.tasks.eit.data.voltages import ELECTRODES, VOLTAGES, measured_pairs

CONTACT_IMPEDANCE = 0.01
CURRENT_AMPERE = 1e-3
PITCH = 2 * np.pi / ELECTRODES
RING_STEP = 0.8
"""Distance of the rings along the boundary, as a share of the mean edge."""
RINGS = 2
CONTACT = np.array([[1 / 3, 1 / 6, -1 / 2], [1 / 6, 1 / 3, -1 / 2], [-1 / 2, -1 / 2, 1.0]])
"""Of an edge under an electrode: its nodes and the electrode, over the edge's admittance."""
SMOOTHINGS = 5
"""Number of times that inner nodes move to the mean of their neighbours."""

Array = NDArray[np.float64]


# -- the mesh ------------------------------------------------------------------------------------
@dataclass(frozen=True)
class DiskMesh:
    """Nodes, triangles, and the boundary edges under each electrode."""

    nodes: Array
    """(n, 2): x, y."""
    triangles: NDArray[np.int64]
    """(t, 3) node numbers, counter-clockwise in (x, y)."""
    electrode_edges: NDArray[np.int64]
    """(16, edges, 2) node numbers."""

    @cached_property
    def longest_edge(self) -> float:
        """The longest side of any triangle."""
        sides = self.nodes[self.triangles]
        return float(np.linalg.norm(sides - np.roll(sides, 1, axis=1), axis=-1).max())

    @cached_property
    def areas(self) -> Array:
        """(t,)"""
        a, b, c = (self.nodes[self.triangles[:, k]] for k in range(3))
        first, second = b - a, c - a
        area: Array = 0.5 * (first[:, 0] * second[:, 1] - first[:, 1] * second[:, 0])
        return area

    @cached_property
    def gradients(self) -> Array:
        """(t, 3, 2): the gradient of each corner's hat function."""
        corners = self.nodes[self.triangles]
        opposite = np.roll(corners, -1, axis=1) - np.roll(corners, 1, axis=1)
        turned = np.stack([-opposite[..., 1], opposite[..., 0]], axis=-1)
        return -turned / (2 * self.areas[:, None, None])

    @cached_property
    def centroids(self) -> Array:
        """(t, 2)"""
        centroids: Array = self.nodes[self.triangles].mean(1)
        return centroids


def disk_mesh(electrode_degrees: float, refinement: int = 1) -> DiskMesh:
    """About 1,600 nodes at `refinement` 1, four times as many at 2, and so on.

    Three rings along the boundary, a triangular lattice inside (rings all the way would err alike
    wherever an outline runs along them), smoothed, triangulated by Delaunay.
    """
    angles, edges_each = _boundary_angles(np.deg2rad(electrode_degrees), refinement)
    nodes = np.concatenate([_on_circle(angles, 1.0), *_inner_rings(angles)])
    nodes = np.concatenate([nodes, _lattice(2 * np.pi / len(angles))])
    nodes = _smoothed(nodes, fixed=len(angles))
    per_pitch = len(angles) // ELECTRODES
    first = np.arange(ELECTRODES)[:, None] * per_pitch + np.arange(edges_each)
    edges = np.stack([first, (first + 1) % len(angles)], axis=-1)
    return DiskMesh(nodes, _triangulate(nodes), edges)


def _boundary_angles(width: float, refinement: int) -> tuple[Array, int]:
    """Angles of the boundary's nodes and the number of edges under each electrode.

    8 edges a pitch, at least 3 under the electrode and 3 beside it; shorter towards the electrode's
    ends, where the current density is steep.
    """
    under = refinement * min(5, max(3, round(8 * width / PITCH)))
    electrode = width / 2 * _towards_ends(under, 0.6)
    gap = PITCH / 2 + (PITCH - width) / 2 * _towards_ends(8 * refinement - under, 0.5)
    one = np.concatenate([electrode, gap])
    return (np.arange(ELECTRODES)[:, None] * PITCH + one).ravel(), under


def _towards_ends(count: int, share: float) -> Array:
    """`count` parts of -1..1 (the last end left out), `share` of the way from even to sine."""
    steps = np.linspace(-1, 1, count, endpoint=False)
    return (1 - share) * steps + share * np.sin(np.pi / 2 * steps)


def _inner_rings(angles: Array) -> list[Array]:
    edge = 2 * np.pi / len(angles)
    return [
        _on_circle(angles + edge / 2 * (ring % 2), 1 - ring * RING_STEP * edge)
        for ring in range(1, RINGS + 1)
    ]


def _lattice(edge: float) -> Array:
    """A triangular lattice inside the rings, off centre so that it has no mirror line."""
    steps = np.arange(-int(1.5 / edge), int(1.5 / edge) + 1)
    column, row = np.meshgrid(steps, steps)
    x = edge * (column + 0.5 * (row % 2) + 0.21)
    y = edge * np.sqrt(3) / 2 * (row + 0.37)
    points = np.stack([x, y], axis=-1).reshape(-1, 2)
    inside = np.hypot(points[:, 0], points[:, 1]) < 1 - (RINGS * RING_STEP + 0.75) * edge
    lattice: Array = points[inside]
    return lattice


def _on_circle(angles: Array, radius: float) -> Array:
    return radius * np.stack([np.sin(angles), np.cos(angles)], axis=-1)


def _smoothed(nodes: Array, fixed: int) -> Array:
    """Moves all but the first `fixed` nodes to the mean of their neighbours."""
    for _ in range(SMOOTHINGS):
        triangles = _triangulate(nodes)
        start, end = triangles.ravel(), np.roll(triangles, -1, axis=1).ravel()
        start, end = np.concatenate([start, end]), np.concatenate([end, start])
        neighbours = np.bincount(start, minlength=len(nodes))
        sums = [np.bincount(start, nodes[end, axis], len(nodes)) for axis in range(2)]
        moved = np.stack(sums, axis=-1) / neighbours[:, None]
        nodes = np.concatenate([nodes[:fixed], moved[fixed:]])
    return nodes


def _triangulate(nodes: Array) -> NDArray[np.int64]:
    triangles = Delaunay(nodes).simplices.astype(np.int64)
    a, b, c = (nodes[triangles[:, k]] for k in range(3))
    first, second = b - a, c - a
    area = first[:, 0] * second[:, 1] - first[:, 1] * second[:, 0]
    # Delaunay leaves slivers of three boundary nodes where rounding puts one inside the hull.
    kept, area = triangles[np.abs(area) > 1e-9], area[np.abs(area) > 1e-9]
    oriented: NDArray[np.int64] = np.where(area[:, None] > 0, kept, kept[:, ::-1])
    return oriented


# -- the model -----------------------------------------------------------------------------------
@cache
def forward_model(electrode_degrees: float) -> ForwardModel:
    """The model of the standard mesh; built once a process (0.3 s)."""
    return ForwardModel(disk_mesh(electrode_degrees))


class ForwardModel:
    """Voltages of a conductivity given by triangle, background 1 S/m.

    The unknowns are the potentials of nodes, then electrodes, in an order in which their symmetric
    matrix is a narrow band; the first electrode is at zero.
    """

    def __init__(self, mesh: DiskMesh) -> None:
        self.mesh = mesh
        self.stiffness = mesh.areas[:, None, None] * (
            mesh.gradients @ mesh.gradients.transpose(0, 2, 1)
        )
        edges, size = mesh.electrode_edges, len(mesh.nodes) + ELECTRODES
        electrode = np.arange(len(mesh.nodes), size)[:, None, None]
        touching = np.concatenate([edges, np.broadcast_to(electrode, (*edges.shape[:2], 1))], -1)
        start, end = np.moveaxis(mesh.nodes[edges], 2, 0)
        lengths = np.linalg.norm(end - start, axis=-1).reshape(-1, 1, 1)
        self._contacts = (lengths / CONTACT_IMPEDANCE * CONTACT).ravel()
        pairs = np.concatenate([_pairs(mesh.triangles), _pairs(touching.reshape(-1, 3))])
        graph = coo_matrix((np.ones(len(pairs)), pairs.T), (size, size)).tocsr()
        self._order = reverse_cuthill_mckee(graph, symmetric_mode=True)
        row, column = np.argsort(self._order)[pairs].T
        self._lower = np.flatnonzero(row >= column)
        self._width = int((row - column).max()) + 1
        self._places = (column * self._width + row - column)[self._lower]
        currents = np.zeros((size, ELECTRODES))
        currents[-ELECTRODES:] = drive_currents()
        self._currents = np.asfortranarray(currents[self._order])
        self._ground = int(np.argmax(self._order == len(mesh.nodes)))

    @cached_property
    def background(self) -> Array:
        """(n + 16, 16): the background's potentials for each drive."""
        return self.potentials(np.ones(len(self.mesh.triangles)))

    def potentials(self, sigma: Array) -> Array:
        """(n + 16, 16) volts of nodes, then electrodes, for each drive."""
        inside = (sigma[:, None, None] * self.stiffness).ravel()
        values = np.concatenate([inside, self._contacts])[self._lower]
        size, width = len(self._order), self._width
        band = np.bincount(self._places, values, size * width).reshape(size, width).T
        band[0, self._ground] += 1.0
        solved = np.empty((size, ELECTRODES))
        solved[self._order] = solveh_banded(
            band, self._currents, lower=True, overwrite_ab=True, check_finite=False
        )
        return solved

    def change(self, sigma: Array) -> Array:
        """(208,) volts: `v(sigma) - v(1)` for `sigma` (triangles,)."""
        return measure_drives((self.potentials(sigma) - self.background)[-ELECTRODES:])

    def jacobian(self) -> Array:
        """(208, triangles): d voltage / d sigma at the background (the adjoint field method)."""
        corners = self.background[self.mesh.triangles]
        fields = np.einsum("tkd,tkp->tdp", self.mesh.gradients, corners)
        products = -np.einsum("tdi,tdj,t->ijt", fields, fields, self.mesh.areas)
        # A drive of current I measures -I times the potential difference of its own pair.
        scaled = products / -CURRENT_AMPERE
        pairs = measured_pairs()
        picked: Array = np.take_along_axis(scaled, pairs[:, :, None], axis=1)
        return picked.reshape(VOLTAGES, -1)


def _pairs(corners: NDArray[np.int64]) -> NDArray[np.int64]:
    """(9 n, 2): each two of the three corners of each of n elements, rows first."""
    rows, columns = np.repeat(corners, 3, axis=1), np.tile(corners, (1, 3))
    return np.stack([rows.ravel(), columns.ravel()], axis=-1)


def drive_currents() -> Array:
    """(16 electrodes, 16 drives) amperes: in at i, out at i + 1."""
    into = np.eye(ELECTRODES)
    return CURRENT_AMPERE * (into - np.roll(into, 1, axis=0))


def measure_drives(potentials: Array) -> Array:
    """(16 electrodes, 16 drives) -> (208,): u(j+1) - u(j), so that the background is positive."""
    flat = potentials.ravel()
    differences: Array = flat[_UPPER] - flat[_LOWER]
    return differences


_LOWER = (measured_pairs() * ELECTRODES + np.arange(ELECTRODES)[:, None]).ravel()
_UPPER = (_LOWER + ELECTRODES) % ELECTRODES**2
