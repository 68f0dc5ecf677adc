"""The complete electrode model on a mesh of the unit disk, solved by changes to one inverse.

Somersalo, Cheney, Isaacson (1992), doi 10.1137/0152060; linear triangles. The background's inverse
is computed once. A change of conductivity inside a region leaves the equations of the nodes in the
region's interior as they are, up to a factor; so it acts as sources on the region's outline alone,
and a sample costs a dense system of the outline's size.

The mesh's boundary resolves the 16 electrodes. Coordinates are the image's: x to the right, y down,
so electrode k sits at (sin 22.5k deg, cos 22.5k deg): electrode 0 at the bottom centre, then
counter-clockwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import lapack
from scipy.spatial import Delaunay

from tpukit.tasks.eit.data.voltages import ELECTRODES, VOLTAGES, measured_pairs

CONTACT_IMPEDANCE = 0.01
CURRENT_AMPERE = 1e-3
PITCH = 2 * np.pi / ELECTRODES
RING_STEP = 0.8
"""Distance of the rings along the boundary, as a share of the mean edge."""
RINGS = 2
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
    def corners(self) -> NDArray[np.int64]:
        """(3, t): the triangles' node numbers, corner by corner."""
        return np.ascontiguousarray(self.triangles.T)

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
    """Voltages of a conductivity given by triangle, background 1 S/m."""

    def __init__(self, mesh: DiskMesh) -> None:
        self.mesh = mesh
        self.stiffness = mesh.areas[:, None, None] * (
            mesh.gradients @ mesh.gradients.transpose(0, 2, 1)
        )
        self._node_order = np.argsort(mesh.triangles.ravel(), kind="stable") // 3
        self._node_start = np.searchsorted(
            np.sort(mesh.triangles.ravel()), np.arange(len(mesh.nodes))
        )
        self._under_electrode = np.zeros(len(mesh.nodes), bool)
        self._under_electrode[mesh.electrode_edges.ravel()] = True

    @cached_property
    def inverse(self) -> Array:
        """(n + 16, n + 16): from currents to potentials of nodes, then electrodes."""
        return _symmetric_inverse(self.system(np.ones(len(self.mesh.triangles))))

    @cached_property
    def drive_potentials(self) -> Array:
        """(n, 16): the background's potential at the nodes for each drive."""
        n = len(self.mesh.nodes)
        potentials: Array = self.inverse[:n, n:] @ drive_currents()
        return potentials

    @cached_property
    def _to_electrodes(self) -> Array:
        n = len(self.mesh.nodes)
        return np.ascontiguousarray(self.inverse[:n, n:])

    def system(self, sigma: Array) -> Array:
        """The dense matrix of the model, (n + 16, n + 16); electrode potentials sum to zero."""
        mesh, n = self.mesh, len(self.mesh.nodes)
        matrix = np.zeros((n + ELECTRODES, n + ELECTRODES))
        rows, columns = mesh.triangles[:, :, None], mesh.triangles[:, None, :]
        np.add.at(matrix, (rows, columns), sigma[:, None, None] * self.stiffness)
        self._add_electrodes(matrix)
        matrix[n:, n:] += 1 / ELECTRODES
        return matrix

    def _add_electrodes(self, matrix: Array) -> None:
        mesh, n = self.mesh, len(self.mesh.nodes)
        lengths = np.linalg.norm(np.diff(mesh.nodes[mesh.electrode_edges], axis=2)[:, :, 0], axis=2)
        admittance = lengths / CONTACT_IMPEDANCE
        for k in range(ELECTRODES):
            for (a, b), value in zip(mesh.electrode_edges[k], admittance[k], strict=True):
                matrix[[a, b], [a, b]] += value / 3
                matrix[[a, b], [b, a]] += value / 6
                matrix[[a, b], n + k] -= value / 2
                matrix[n + k, [a, b]] -= value / 2
                matrix[n + k, n + k] += value

    def change(self, sigma: Array) -> Array:
        """(208,) volts: `v(sigma) - v(1)` for `sigma` (triangles,)."""
        outline = self._outline(sigma)
        if not len(outline):
            return np.zeros(VOLTAGES)
        touched, delta = self._rows(sigma, outline)
        system = delta @ self.inverse[np.ix_(touched, outline)]
        system.flat[:: len(outline) + 1] += 1.0
        _, _, sources, failed = lapack.dgesv(system, delta @ self.drive_potentials[touched])
        if failed:
            raise np.linalg.LinAlgError("the conductivity leaves a part without contact")
        return -measure_drives(self._to_electrodes[outline].T @ sources)

    def _outline(self, sigma: Array) -> NDArray[np.int64]:
        """Nodes whose equation is not the background's times a factor."""
        by_node = sigma[self._node_order]
        lowest = np.minimum.reduceat(by_node, self._node_start)
        highest = np.maximum.reduceat(by_node, self._node_start)
        return np.flatnonzero((lowest != highest) | (self._under_electrode & (highest != 1.0)))

    def _rows(self, sigma: Array, outline: NDArray[np.int64]) -> tuple[NDArray[np.int64], Array]:
        """The outline's rows of the change of the matrix, and the nodes of their columns."""
        mesh = self.mesh
        on_outline = np.zeros(len(mesh.nodes), bool)
        on_outline[outline] = True
        changed = np.flatnonzero(sigma != 1.0)
        near = changed[on_outline[mesh.corners[:, changed]].any(0)]
        row_of = np.full(len(mesh.nodes), -1)
        row_of[outline] = np.arange(len(outline))
        corners = mesh.triangles[near]
        rows = row_of[corners]
        column_of = np.zeros(len(mesh.nodes), np.int64)
        column_of[corners] = 1
        touched = np.flatnonzero(column_of)
        column_of[touched] = np.arange(len(touched))
        flat = rows[:, :, None] * len(touched) + column_of[corners][:, None, :]
        values = (sigma[near] - 1.0)[:, None, None] * self.stiffness[near]
        kept = np.broadcast_to((rows >= 0)[:, :, None], flat.shape)
        size = len(outline) * len(touched)
        delta = np.bincount(flat[kept], values[kept], size).astype(np.float64, copy=False)
        return touched.astype(np.int64, copy=False), delta.reshape(len(outline), -1)

    def jacobian(self) -> Array:
        """(208, triangles): d voltage / d sigma at the background (the adjoint field method)."""
        corners = self.drive_potentials[self.mesh.triangles]
        fields = np.einsum("tkd,tkp->tdp", self.mesh.gradients, corners)
        products = -np.einsum("tdi,tdj,t->ijt", fields, fields, self.mesh.areas)
        # A drive of current I measures -I times the potential difference of its own pair.
        scaled = products / -CURRENT_AMPERE
        pairs = measured_pairs()
        picked: Array = np.take_along_axis(scaled, pairs[:, :, None], axis=1)
        return picked.reshape(VOLTAGES, -1)


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


def _symmetric_inverse(matrix: Array) -> Array:
    factor, failed = lapack.dpotrf(matrix)
    inverse, failed_too = lapack.dpotri(factor)
    if failed or failed_too:
        raise np.linalg.LinAlgError("the background's matrix is not positive definite")
    upper = np.triu(inverse)
    return np.ascontiguousarray(upper + np.triu(inverse, 1).T)
