"""Simulated samples: what is in the tank, and what the electrodes measure.

A sample is a pure function of (settings, index): workers and order do not matter. The ranges of
contrast, size and noise were chosen after looking at the real sets' voltages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tpukit.tasks.eit.simulation.forward import forward_model
from tpukit.tasks.eit.simulation.inclusions import (
    Contrast,
    Labels,
    draw_image,
    draw_inclusions,
    sigma_on,
)


@dataclass(frozen=True)
class SimulationSettings:
    """What decides a sample's values, together with its index."""

    seed: int = 0
    """Any non-negative integer below 2**64."""
    labels: Labels = "classes"
    """`classes`: -1 resistive, +1 conductive, as in the real sets; `difference`: sigma - 1."""
    contrast: Contrast = "strong"
    """`strong`: sigma 0.01..0.03 and 10..30, as in the real sets; `mild`: 0.01..0.9 and 1.1..2."""
    noise_db: tuple[float, float] = (33.0, 60.0)
    """Signal to noise of a frame of voltage differences, drawn evenly between these."""
    electrode_degrees: float = 10.2
    """10.2 as in the real sets; 4 as in the published simulated set."""


class SimulatedSample(NamedTuple):
    """One sample as its file holds it."""

    ys: NDArray[np.float32]
    """(208,) volts: with the objects minus without, with noise."""
    xs: NDArray[np.float32]
    """(128, 128) labels."""


def simulate(settings: SimulationSettings, index: int) -> SimulatedSample:
    """Sample number `index`."""
    rng = np.random.Generator(np.random.Philox(key=[settings.seed, index]))
    inclusions = draw_inclusions(rng, settings.contrast)
    model = forward_model(settings.electrode_degrees)
    voltages = model.change(sigma_on(model.mesh, inclusions))
    decibel = rng.uniform(*settings.noise_db)
    noise = rng.standard_normal(len(voltages)) * noise_level(voltages, decibel)
    ys = (voltages + noise).astype(np.float32)
    return SimulatedSample(ys, draw_image(inclusions, settings.labels))


def noise_level(voltages: NDArray[np.float64], decibel: float) -> float:
    """Volts: the noise's standard deviation at `decibel` below the frame's root mean square."""
    return float(np.sqrt((voltages**2).mean()) * 10 ** (-decibel / 20))
