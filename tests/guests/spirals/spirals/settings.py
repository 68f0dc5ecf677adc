"""The options of the task and of its data."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np


@dataclass(frozen=True)
class Settings:
    width: int = 64
    """Width of the network."""
    noise_levels: int = 50
    """Noise levels of the diffusion."""
    target: Literal["noise", "point"] = "noise"
    """What the network predicts."""
    data_path: str = "./data"
    """Folder with points.npy."""


@dataclass(frozen=True)
class Sampling:
    draws: int = 200
    """Points to draw."""
    ancestral: bool = False
    """Add noise in each sampling step (DDPM) instead of none (DDIM)."""


@dataclass(frozen=True)
class Drawing(Sampling):
    file_type: Literal["npy", "csv"] = "npy"
    """Type of the file to write."""


@dataclass(frozen=True)
class SpiralPoints:
    """Generate points on a spiral."""

    n: int = 1000
    """Points."""
    turns: float = 1.5
    """Turns of the spiral."""
    marks: ClassVar[tuple[str, ...]] = ("points.npy",)

    def write(self, out, progress, log):
        along = np.random.default_rng(0).uniform(0.2, 1, self.n) * self.turns * 2 * math.pi
        points = np.stack([along * np.cos(along), along * np.sin(along)], 1) / along.max()
        out.mkdir(parents=True, exist_ok=True)
        np.save(out / "points.npy", points.astype(np.float32))
        progress.advance(self.n)
        log(f"{self.n:,} points in {out}")
        return {"points": self.n}
