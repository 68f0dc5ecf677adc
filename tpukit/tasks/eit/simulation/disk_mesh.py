"""A triangle mesh of the unit disk whose boundary resolves the 16 electrodes.

Coordinates are the image's: x to the right, y down, so electrode k sits at
(sin 22.5k deg, cos 22.5k deg): electrode 0 at the bottom centre, then counter-clockwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import Delaunay

from tpukit.tasks.eit.data.conditioning import ELECTRODES

PITCH = 2 * np.pi / ELECTRODES

Array = NDArray[np.float64]


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


RING_STEP = 0.8
"""Distance of the rings along the boundary, as a share of the mean edge."""
RINGS = 2


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


def _smoothed(nodes: Array, fixed: int, passes: int = 5) -> Array:
    """Moves all but the first `fixed` nodes to the mean of their neighbours."""
    for _ in range(passes):
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
