"""Linear one-step reconstructions, to compare with: Tikhonov and NOSER.

delta = W^-1 J^T (J W^-1 J^T + lambda I)^-1 voltages, with J of the complete electrode model at the
background. Tikhonov: W is the triangles' area (the function's own norm). NOSER (Cheney et al.,
1990, doi 10.1002/ima.1850020203): W is a power of the sensitivity, here 1/2. Both lambdas were
chosen on simulated samples.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import cKDTree

from tpukit.tasks.eit.data.voltages import IMAGE_SIZE, VOLTAGES
from tpukit.tasks.eit.metrics import disk_mask
from tpukit.tasks.eit.simulation.forward import DiskMesh, forward_model
from tpukit.tasks.eit.simulation.inclusions import pixel_centres

Array = NDArray[np.float64]

TIKHONOV_LAMBDA = 3e-3
"""As a share of the mean diagonal of J W^-1 J^T."""
NOSER_LAMBDA = 1.5e-2
NOSER_POWER = 0.5


@dataclass(frozen=True, eq=False)
class LinearReconstruction:
    """Conductivity changes of triangles from voltages, drawn as images."""

    matrix: NDArray[np.float32]
    """(triangles + 1, 208), the last row zero: what pixels outside the disk show."""
    triangle_of_pixel: NDArray[np.int64]
    """(128 * 128,)"""

    def images(self, ys: NDArray[np.floating[Any]]) -> NDArray[np.float32]:
        """Voltages (..., 208), in volts -> conductivity changes (..., 128, 128), in S/m."""
        triangles = np.asarray(ys, np.float32) @ self.matrix.T
        images: NDArray[np.float32] = triangles[..., self.triangle_of_pixel]
        return images.reshape(*images.shape[:-1], IMAGE_SIZE, IMAGE_SIZE)


@cache
def tikhonov(electrode_degrees: float = 10.2) -> LinearReconstruction:
    """One-step Tikhonov for this electrode width."""
    model = forward_model(electrode_degrees)
    return _one_step(model.mesh, model.jacobian(), model.mesh.areas, TIKHONOV_LAMBDA)


@cache
def noser(electrode_degrees: float = 10.2) -> LinearReconstruction:
    """One Gauss-Newton step with NOSER's prior for this electrode width."""
    model = forward_model(electrode_degrees)
    jacobian, areas = model.jacobian(), model.mesh.areas
    sensitivity = ((jacobian / areas) ** 2).sum(0)
    return _one_step(model.mesh, jacobian, sensitivity**NOSER_POWER * areas, NOSER_LAMBDA)


def _one_step(
    mesh: DiskMesh, jacobian: Array, weights: Array, share: float
) -> LinearReconstruction:
    weighted = jacobian / weights
    normal = weighted @ jacobian.T
    normal[np.diag_indices(VOLTAGES)] += share * np.trace(normal) / VOLTAGES
    # (triangles, 208), then a row of zeros.
    step = np.linalg.solve(normal, weighted).T
    matrix = np.concatenate([step, np.zeros((1, VOLTAGES))]).astype(np.float32)
    return LinearReconstruction(matrix, _triangle_of_pixel(mesh))


def _triangle_of_pixel(mesh: DiskMesh) -> NDArray[np.int64]:
    """The nearest triangle of each pixel; the number after the last one outside the disk."""
    _, nearest = cKDTree(mesh.centroids).query(pixel_centres().reshape(-1, 2))
    inside = disk_mask(IMAGE_SIZE).ravel()
    return np.where(inside, nearest, len(mesh.triangles)).astype(np.int64)
