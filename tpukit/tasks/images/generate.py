"""Generated images of shapes: a set to try with, of any size.

Image `i` of a part is a function of (seed, part, i) alone.
"""

from __future__ import annotations

import io
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from PIL import Image, ImageDraw

from tpukit.io.files import write_file
from tpukit.io.ranges import LARGEST_BATCH, SEED, Range, require_in_range, setting
from tpukit.io.tables import write_csv

if TYPE_CHECKING:
    from tpukit.io.progress import Progress

Point = tuple[float, float]
CLASSES = ("arrow", "circle", "cross", "ring", "square", "star", "triangle", "wave")
PARTS = {"train": 0.8, "valid": 0.1, "test": 0.1}
NOISE = 8.0
DISTRACTORS = 2
DARK, BRIGHT = (0, 90), (140, 255)
"""Ranges of the colours of background and shape, which do not depend on the class."""


def draw_shape(seed: int, part: str, index: int, side: int) -> tuple[Image.Image, str]:
    """Image `index` of a part, the same on every machine, and its class."""
    rng = random.Random(f"{seed}/{part}/{index}")
    name = CLASSES[index % len(CLASSES)]
    scale = 2
    canvas = Image.new("RGB", (scale * side, scale * side), _colour(rng, DARK))
    draw = ImageDraw.Draw(canvas)
    for _ in range(DISTRACTORS):
        points = [(rng.uniform(0, scale * side), rng.uniform(0, scale * side)) for _ in range(2)]
        draw.line(points, _colour(rng, BRIGHT), width=rng.randint(1, 3))
    radius = rng.uniform(0.25, 0.42) * scale * side
    margin = radius * 1.05
    centre = tuple(rng.uniform(margin, scale * side - margin) for _ in range(2))
    turn, colour = rng.uniform(0, 2 * math.pi), _colour(rng, BRIGHT)
    _draw(draw, name, (centre[0], centre[1]), radius, turn, colour)
    small = np.asarray(canvas.resize((side, side), Image.Resampling.BILINEAR), np.float32)
    noise = np.random.default_rng(rng.getrandbits(64)).normal(0, NOISE, small.shape)
    return Image.fromarray(np.clip(small + noise, 0, 255).astype(np.uint8)), name


def _colour(rng: random.Random, between: tuple[int, int]) -> tuple[int, int, int]:
    return rng.randint(*between), rng.randint(*between), rng.randint(*between)


def _draw(
    draw: ImageDraw.ImageDraw,
    name: str,
    centre: Point,
    radius: float,
    turn: float,
    colour: tuple[int, int, int],
) -> None:
    x, y = centre
    box = (x - radius, y - radius, x + radius, y + radius)
    width = max(2, round(radius / 4))
    if name == "circle":
        draw.ellipse(box, colour)
    elif name == "ring":
        draw.ellipse(box, outline=colour, width=width)
    elif name == "wave":
        line = [(t / 10 - 1, 0.4 * math.sin(t / 10 * 2 * math.pi)) for t in range(21)]
        draw.line(_placed(line, centre, radius, turn), colour, width=width)
    else:
        draw.polygon(_placed(_outline(name), centre, radius, turn), colour)


def _outline(name: str) -> list[Point]:
    """Corners of a shape within the unit circle."""
    if name == "cross":
        third = 1 / 3
        quarter = [(third, 0.94), (third, third), (0.94, third)]
        turned = [quarter]
        for _ in range(3):
            turned.append([(y, -x) for x, y in turned[-1]])
        return [point for part in turned for point in part]
    if name == "arrow":
        return [(1, 0), (0.1, 0.7), (0.1, 0.25), (-0.95, 0.25), (-0.95, -0.25), (0.1, -0.25),
                (0.1, -0.7)]  # fmt: skip
    corners = {"triangle": 3, "square": 4, "star": 10}[name]
    radii = [1.0 if name != "star" or k % 2 == 0 else 0.4 for k in range(corners)]
    angles = [2 * math.pi * k / corners for k in range(corners)]
    return [(r * math.cos(a), r * math.sin(a)) for r, a in zip(radii, angles, strict=True)]


def _placed(points: list[Point], centre: Point, radius: float, turn: float) -> list[Point]:
    cos, sin = radius * math.cos(turn), radius * math.sin(turn)
    return [(centre[0] + x * cos - y * sin, centre[1] + x * sin + y * cos) for x, y in points]


@dataclass(frozen=True)
class ShapeImages:
    """Generate images of eight shapes, to classify."""

    n: int = setting(4000, Range(10 * len(CLASSES), LARGEST_BATCH))
    """Images: 80 % train, 10 % valid, 10 % test."""
    seed: int = setting(0, SEED)
    """Seed; an image depends on it and its index."""
    side: int = setting(64, Range(16, 1024))
    """Height and width."""
    marks: ClassVar[tuple[str, ...]] = ("test_labels.csv", "train/*/000000.png")

    def __post_init__(self) -> None:
        require_in_range(self, f"A set has at least {10 * len(CLASSES)} images, ten a class.")

    def write(self, out: Path, progress: Progress, log: Callable[[str], None]) -> dict[str, Any]:
        """train/CLASS/*.png, valid/CLASS/*.png, test/*.png, test.csv (ids), test_labels.csv."""
        counts = {part: round(share * self.n) for part, share in PARTS.items()}
        labels = []
        for part, count in counts.items():
            for index in range(count):
                image, name = draw_shape(self.seed, part, index, self.side)
                folder = out / part if part == "test" else out / part / name
                _write(folder / f"{index:06}.png", image)
                if part == "test":
                    labels.append((f"{index:06}", name))
                progress.advance()
        write_csv(out / "test.csv", [("id",), *((name,) for name, _ in labels)])
        write_csv(out / "test_labels.csv", [("id", "label"), *labels])
        log(
            f"{counts['train']:,} training, {counts['valid']:,} validation and {counts['test']:,}"
            f" test images of {len(CLASSES)} classes in {out}"
        )
        way = "tpukit train --preset quick --data-path"
        log(f"Train on them: {way} {quote(str(out))}")
        return {**counts, "classes": len(CLASSES)}


def _write(path: Path, image: Image.Image) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    stream = io.BytesIO()
    image.save(stream, "png")
    write_file(path, stream.getvalue(), sync=False)
