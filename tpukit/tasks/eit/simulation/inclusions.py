"""Objects in the tank: random shapes as level sets, drawn on the image and on the mesh.

A level function takes points (..., 2) and gives a distance-like value, negative inside.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tpukit.tasks.eit.data.voltages import IMAGE_SIZE
from tpukit.tasks.eit.simulation.forward import DiskMesh

Array = NDArray[np.float64]
Level = Callable[[Array], Array]
Labels = Literal["classes", "difference"]
Contrast = Literal["strong", "mild"]

WALL = 0.96
"""No object reaches beyond this share of the tank's radius."""
GAP = 0.06
"""Least distance between two objects, in tank radii: more than a triangle."""
COUNTS = (0.35, 0.35, 0.2, 0.1)
"""How often there are 1, 2, 3 and 4 objects."""
RADII = (0.12, 0.42)
SIGMA = {"strong": ((0.01, 0.03), (10.0, 30.0)), "mild": ((0.01, 0.9), (1.1, 2.0))}
"""Resistive and conductive ranges in S/m, the water at 1: `strong` is plastic and metal."""


@dataclass(frozen=True)
class Inclusion:
    """One object: its outline, conductivity and a circle that holds it."""

    level: Level
    sigma: float
    centre: tuple[float, float]
    radius: float


def draw_inclusions(rng: np.random.Generator, contrast: Contrast) -> list[Inclusion]:
    """1 to 4 objects that keep their distance; one that finds no place is left out."""
    wanted = 1 + int(np.searchsorted(np.cumsum(COUNTS), rng.random()))
    placed: list[Inclusion] = []
    for _ in range(wanted):
        # Many objects are small ones, as in the tank.
        radius = RADII[0] + (RADII[1] - RADII[0]) * rng.random() / (0.6 + 0.4 * wanted)
        centre = _place(rng, radius, placed)
        if centre is not None:
            shape = SHAPES[int(rng.random() * len(SHAPES))]
            level = shape(rng, radius, centre)
            placed.append(Inclusion(level, _draw_sigma(rng, contrast), centre, radius))
    return placed


def _place(
    rng: np.random.Generator, radius: float, placed: list[Inclusion]
) -> tuple[float, float] | None:
    for distance, turn in rng.random((20, 2)).tolist():
        reach = (WALL - radius) * distance**0.5
        x, y = reach * np.cos(2 * np.pi * turn), reach * np.sin(2 * np.pi * turn)
        if all(
            np.hypot(x - other.centre[0], y - other.centre[1]) > radius + other.radius + GAP
            for other in placed
        ):
            return float(x), float(y)
    return None


def _draw_sigma(rng: np.random.Generator, contrast: Contrast) -> float:
    low, high = SIGMA[contrast][int(rng.random() < 0.5)]
    return float(low * (high / low) ** rng.random())


# -- shapes: each fills its circle roughly, and never leaves it ----------------------------------
def _ellipse(rng: np.random.Generator, radius: float, centre: tuple[float, float]) -> Level:
    ratio, turn = rng.random(2).tolist()
    half = np.array([radius, radius * max(0.45, min(1.0, 0.35 + ratio))])
    to_own = _rotation(turn) / half

    def level(points: Array) -> Array:
        own = (points - centre) @ to_own
        distance: Array = (np.sqrt((own * own).sum(-1)) - 1.0) * half[1]
        return distance

    return level


def _polygon(rng: np.random.Generator, radius: float, centre: tuple[float, float]) -> Level:
    """3 to 6 corners on the circle, evenly spaced up to a third of a step."""
    corners = 3 + int(rng.random() * 4)
    jitter = (rng.random(corners + 1) - 0.5) / 3
    angles = 2 * np.pi * (np.arange(corners) + jitter[:-1] + corners * jitter[-1]) / corners
    following = np.append(angles[1:], angles[0] + 2 * np.pi)
    middle = (angles + following) / 2
    normals = np.stack([np.cos(middle), np.sin(middle)])
    offsets = radius * np.cos((following - angles) / 2)

    def level(points: Array) -> Array:
        distance: Array = ((points - centre) @ normals - offsets).max(-1)
        return distance

    return level


def _box(rng: np.random.Generator, radius: float, centre: tuple[float, float]) -> Level:
    ratio, turn = rng.random(2).tolist()
    corner = np.arctan(0.3 + 0.7 * ratio)
    half = radius * np.array([np.cos(corner), np.sin(corner)])
    to_own = _rotation(turn)

    def level(points: Array) -> Array:
        distance: Array = (np.abs((points - centre) @ to_own) - half).max(-1)
        return distance

    return level


def _blob(rng: np.random.Generator, radius: float, centre: tuple[float, float]) -> Level:
    """A star-shaped outline with harmonics 2 to 4."""
    size, phase = rng.random((2, 3))
    waves = 0.3 * size / np.arange(2, 5) ** 0.5 * np.exp(2j * np.pi * phase)
    mean = radius / (1 + np.abs(waves).sum())

    def level(points: Array) -> Array:
        x, y = points[..., 0] - centre[0], points[..., 1] - centre[1]
        distance = np.sqrt(x * x + y * y) + 1e-12
        unit = (x + 1j * y) / distance
        series = unit * unit * (waves[0] + unit * (waves[1] + unit * waves[2]))
        outline: Array = distance - mean * (1 + series.real)
        return outline

    return level


def _crescent(rng: np.random.Generator, radius: float, centre: tuple[float, float]) -> Level:
    """A disk with a round notch."""
    turn, depth = rng.random(2).tolist()
    direction = np.array([np.cos(2 * np.pi * turn), np.sin(2 * np.pi * turn)])
    notch = np.array(centre) + radius * (1.1 - 0.4 * depth) * direction

    def level(points: Array) -> Array:
        outer = np.sqrt(((points - centre) ** 2).sum(-1)) - radius
        inner = np.sqrt(((points - notch) ** 2).sum(-1)) - 0.7 * radius
        distance: Array = np.maximum(outer, -inner)
        return distance

    return level


def _rotation(turn: float) -> Array:
    cosine, sine = np.cos(2 * np.pi * turn), np.sin(2 * np.pi * turn)
    return np.array([[cosine, -sine], [sine, cosine]])


SHAPES = (_ellipse, _ellipse, _polygon, _box, _blob, _blob, _crescent)


# -- drawing -------------------------------------------------------------------------------------
def pixel_centres(size: int = IMAGE_SIZE) -> Array:
    """(size, size, 2): x right, y down; the disk's radius is half the image."""
    steps = (np.arange(size) - (size - 1) / 2) / (size / 2)
    return np.stack(np.meshgrid(steps, steps), axis=-1)


_PIXELS = pixel_centres()


def draw_image(inclusions: list[Inclusion], labels: Labels) -> NDArray[np.float32]:
    """(128, 128): -1 resistive and +1 conductive, or sigma - 1; edges one pixel soft.

    Values are exact in float16, so that a data set packs to half its size without loss.
    """
    image = np.zeros((IMAGE_SIZE, IMAGE_SIZE), np.float32)
    for one in inclusions:
        window = _window(one)
        inside = 0.5 - one.level(_PIXELS[window]) * (IMAGE_SIZE / 2)
        value = one.sigma - 1.0 if labels == "difference" else np.sign(one.sigma - 1.0)
        # Objects are further apart than their edges are soft: what is added here was zero.
        image[window] += (value * np.clip(inside, 0.0, 1.0)).astype(np.float16)
    return image


def _window(one: Inclusion) -> tuple[slice, slice]:
    half = IMAGE_SIZE / 2
    column, row = (half * (1 + c) for c in one.centre)
    reach = half * one.radius + 2
    return (
        slice(max(0, int(row - reach)), int(row + reach) + 1),
        slice(max(0, int(column - reach)), int(column + reach) + 1),
    )


def sigma_on(mesh: DiskMesh, inclusions: list[Inclusion]) -> Array:
    """(triangles,) S/m; triangles that an outline crosses get a mixture (see `mixture`)."""
    sigma = np.ones(len(mesh.triangles))
    for one in inclusions:
        away = mesh.nodes - one.centre
        near = np.flatnonzero((away * away).sum(1) < (one.radius + mesh.longest_edge) ** 2)
        level = np.ones(len(mesh.nodes))
        level[near] = one.level(mesh.nodes[near])
        negative = level < 0
        first, second, third = mesh.triangles.T
        touched = np.flatnonzero(negative[first] | negative[second] | negative[third])
        share = negative_share(level[mesh.triangles[touched].T])
        sigma[touched] *= mixture(share, one.sigma)
    return sigma


def negative_share(corners: Array) -> Array:
    """The part of each triangle where the linear function with these corner values is negative.

    `corners`: (3, n). Returns (n,).
    """
    low, middle, high = np.sort(corners, axis=0)
    tiny = 1e-300
    one_inside = low * low / ((middle - low) * (high - low) + tiny)
    one_outside = 1.0 - high * high / ((high - low) * (high - middle) + tiny)
    share = np.where(middle >= 0, one_inside, one_outside)
    inside: Array = np.where(high <= 0, 1.0, np.where(low >= 0, 0.0, share))
    return inside


def mixture(share: Array, sigma: float) -> Array:
    """The conductivity of a triangle that holds `share` of `sigma` in water.

    Linear in (s - 1) / (s + a), between the series (a = 0) and parallel (a infinite) bounds.
    a = 1 is the two-dimensional effective medium; metal takes 1/2, which makes up for linear
    triangles being too stiff (error against the analytic concentric object 1 to 2 %, not 3).
    """
    a = 1.0 if sigma < 1.0 else 0.5
    mixed = share * ((sigma - 1.0) / (sigma + a))
    conductivity: Array = (1.0 + a * mixed) / (1.0 - mixed)
    return conductivity
