"""The TPU slices to compile for, by their Cloud names. No torch here."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from tpukit.errors import ConfigError
from tpukit.io.units import GIB
from tpukit.knowledge.accelerators import CompilerTarget, tpu_by_cloud_name, tpu_generations


@dataclass(frozen=True)
class Target:
    """One TPU slice to compile for."""

    name: str
    generation: CompilerTarget
    topology: str
    """libtpu's name of it, `v5e:2x4`."""
    devices: int
    has_kernels: bool
    """Whether its devices run tpukit's Pallas kernels."""

    @property
    def memory_bytes(self) -> int:
        """HBM of one device that programs may use."""
        return int(self.generation.memory_gib * GIB)


def target_names() -> list[str]:
    """Every name that `find_target` takes."""
    return [
        f"{generation.name}-{count}"
        for generation in tpu_generations()
        if generation.compiler
        for count in generation.compiler.topologies
    ]


def find_target(name: str) -> Target:
    """The target of a Cloud name (`v5e-8`, `v5litepod-8`).

    Raises:
        ConfigError: the name is unknown; the hint names similar ones.
    """
    match = re.fullmatch(r"(?:tpu[ -]?)?([a-z0-9]+)-(\d+)", name.strip().lower())
    known = tpu_by_cloud_name(match[1]) if match else None
    if match is None or known is None or known.compiler is None:
        names = target_names()
        similar = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.3)
        raise ConfigError(
            f"unknown target {name!r}.",
            f"Similar names: {', '.join(similar)}." if similar else f"Use {_either(names)}.",
            id="no-target",
        )
    target, count = known.compiler, int(match[2])
    if count not in target.topologies:
        raise ConfigError(
            f"unknown target {name!r}: {known.name} slices have {_either(target.topologies)}"
            f" {target.counts}.",
            f"Use {known.name}-{min(target.topologies, key=lambda n: abs(n - count))}.",
            id="no-target",
        )
    return Target(
        name=f"{known.name}-{count}",
        generation=target,
        topology=f"{known.name}:{target.topologies[count]}",
        devices=int(count * target.devices_per_count),
        has_kernels=known.has_kernels,
    )


def _either(values: Iterable[int | str]) -> str:
    *most, last = map(str, values)
    return f"{', '.join(most)} or {last}"
