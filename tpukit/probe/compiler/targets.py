"""The TPUs one can ask for by their Cloud names, and what their makers say of them. No torch here.

Peak figures are those of Cloud TPU's own system architecture pages, a device being what the
compiler sees as one: a chip from v5e on (and v5p), a core before.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Literal

from tpukit.errors import ConfigError

GIB = 2**30


@dataclass(frozen=True)
class Generation:
    """What all targets of one TPU generation share."""

    name: str
    memory_gib: float
    """HBM of a device that programs may use, as the compiler reports it."""
    flops_per_second: float
    """Peak bf16 operations of a device."""
    bytes_per_second: float
    """HBM bandwidth of a device."""
    link_bytes_per_second: float | None
    """Bandwidth between devices, all links and both directions; None where it is not published."""
    counts: Literal["chips", "cores"]
    """What the number in a Cloud name counts."""
    devices_per_name_unit: float = 1.0
    approximate: str | None = None
    """Why the compiler's answer is not quite this TPU's, where it is not."""


V2 = Generation("v2", 7.48, 22.5e12, 350e9, None, "cores")
V3 = Generation("v3", 15.48, 61.5e12, 450e9, None, "cores")
V4 = Generation(
    "v4", 15.25, 137.5e12, 614e9, None, "cores",
    approximate="the compiler splits each v4 chip (32 GiB, used as one device) into two cores",
)  # fmt: skip
V5E = Generation("v5e", 15.75, 197e12, 819e9, 200e9, "chips")
V5P = Generation("v5p", 95.74, 459e12, 2765e9, 600e9, "cores", devices_per_name_unit=0.5)
V6E = Generation("v6e", 31.25, 918e12, 1640e9, 448e9, "chips")

TWO_BY_TWO = "2x2"
SHAPES: dict[str, tuple[Generation, dict[int, str]]] = {
    "v2": (V2, {8: TWO_BY_TWO, 32: "4x4", 128: "8x8", 256: "8x16", 512: "16x16"}),
    "v3": (V3, {8: TWO_BY_TWO, 32: "4x4", 64: "4x8", 128: "8x8", 256: "8x16", 512: "16x16"}),
    "v4": (V4, {8: "2x2x1", 16: "2x2x2", 32: "2x2x4", 64: "2x4x4", 128: "4x4x4"}),
    "v5e": (V5E, {1: "2x2", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16",
                  256: "16x16"}),
    "v5p": (V5P, {8: "2x2x1", 16: "2x2x2", 32: "2x2x4", 64: "2x4x4", 128: "4x4x4"}),
    "v6e": (V6E, {1: "2x2", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16",
                  256: "16x16"}),
}  # fmt: skip
"""Generation -> the number in a Cloud name -> libtpu's topology (v5e-1: one device of the
smallest)."""

ALIASES = {"v5litepod": "v5e", "v5lite": "v5e", "trillium": "v6e"}


@dataclass(frozen=True)
class Target:
    """One TPU slice to compile for."""

    name: str
    generation: Generation
    topology: str
    """libtpu's name of it, `v5e:2x4`."""
    devices: int

    @property
    def memory_bytes(self) -> int:
        """HBM of one device that programs may use."""
        return int(self.generation.memory_gib * GIB)


def target_names() -> list[str]:
    """Every name that `find_target` takes."""
    return [f"{kind}-{count}" for kind, (_, shapes) in SHAPES.items() for count in shapes]


def find_target(name: str) -> Target:
    """The target of a Cloud name (`v5e-8`, `v5litepod-8`).

    Raises:
        ConfigError: there is none of this name; says which are near.
    """
    match = re.fullmatch(r"(?:tpu[ -]?)?([a-z0-9]+)-(\d+)", name.strip().lower())
    kind = ALIASES.get(match[1], match[1]) if match else None
    if match is None or kind not in SHAPES:
        near = difflib.get_close_matches(name.lower(), target_names(), n=3, cutoff=0.3)
        raise ConfigError(
            f"There is no target {name!r}.",
            f"Near it: {', '.join(near)}." if near else f"There are {', '.join(target_names())}.",
            id="no-target",
        )
    generation, shapes = SHAPES[kind]
    count = int(match[2])
    if count not in shapes:
        raise ConfigError(
            f"There is no target {name!r}: {kind} slices have {_listed(shapes)}"
            f" {generation.counts}.",
            f"The nearest: {kind}-{min(shapes, key=lambda n: abs(n - count))}.",
            id="no-target",
        )
    devices = int(count * generation.devices_per_name_unit)
    return Target(f"{kind}-{count}", generation, f"{kind}:{shapes[count]}", devices)


def _listed(counts: dict[int, str]) -> str:
    *most, last = map(str, counts)
    return f"{', '.join(most)} or {last}"
