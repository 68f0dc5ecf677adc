"""One trial of one batch: what is asked, what comes of it, and what a failure means."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tpukit.probe.compiler.hlo import parse_size

Verdict = Literal["grow", "fine", "near", "over"]


@dataclass(frozen=True)
class TaskSource:
    """How a child process builds the task: a function by its place, and what it is given."""

    factory: str
    """`package.module:function`."""
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class MemoryByKind:
    """Bytes of one device by kind."""

    parameters: int = 0
    optimizer: int = 0
    ema: int = 0
    temporaries: int = 0
    program: int = 0


@dataclass(frozen=True)
class StepCost:
    """What one optimizer step costs one device."""

    flops: float
    """Operations, those of custom kernels added by formula."""
    bytes_accessed: float
    kernel_flops: float = 0.0
    """The part of `flops` that custom kernels do."""


@dataclass(frozen=True)
class Trial:
    """What came of one batch."""

    batch: int
    """Samples a device."""
    fits: bool
    used_bytes: int | None = None
    """Bytes of one device in use at most; where it did not fit, what it wanted."""
    limit_bytes: int | None = None
    fixed_bytes: int | None = None
    """The part that does not depend on the batch."""
    samples_per_second: float | None = None
    """Measured, over all devices."""
    seconds: float = 0.0
    """How long the trial took."""
    error: str | None = None
    """Why it does not fit, in one line."""
    accumulate: int = 1
    memory: MemoryByKind | None = None
    cost: StepCost | None = None
    collectives: Mapping[str, int] = field(default_factory=dict)
    collective_bytes: int = 0
    largest: tuple[Mapping[str, Any], ...] = ()
    """The largest allocations: `size_bytes`, `shape`, `operator`, `place`."""
    effort: str | None = None
    """How hard the compiler tried; None for a measured trial."""
    cached: bool = False
    compiles: int = 0
    """Programs compiled for this trial."""

    @property
    def verdict(self) -> Verdict:
        """How much room is left, as a share of the device's memory."""
        return verdict(self.fits, self.used_bytes, self.limit_bytes)


def verdict(fits: bool, used: int | None, limit: int | None) -> Verdict:
    """Under a quarter of the memory the batch can grow, to a half it is fine, then near."""
    if not fits:
        return "over"
    if used is None or not limit:
        return "fine"
    share = used / limit
    if share < 0.25:
        return "grow"
    return "fine" if share <= 0.5 else "near"


# -- failures -----------------------------------------------------------------------------------

USED_OF = re.compile(r"Used ([0-9.]+[KMGT]?) of ([0-9.]+[KMGT]?) hbm")
ONE_BUFFER = re.compile(r"Allocation \(size=(\d+)\) would exceed memory \(size=(\d+)\)")
EXCEEDS = re.compile(r"\(([0-9.]+[KMGT]?)\) exceeds available HBM \(([0-9.]+[KMGT]?)\)")


def wanted_and_limit(text: str) -> tuple[int | None, int | None]:
    """What an out-of-memory message of the TPU says was wanted, and what there was, in bytes."""
    for pattern in (USED_OF, EXCEEDS):
        if match := pattern.search(text):
            return parse_size(match[1]), parse_size(match[2])
    if match := ONE_BUFFER.search(text):
        # One buffer alone; everything together is more.
        return int(match[1]), int(match[2])
    return None, None


def first_line(text: str, width: int = 300) -> str:
    """The first line that says something, cut to a width."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "no message")
    return line if len(line) <= width else line[: width - 3] + "..."
