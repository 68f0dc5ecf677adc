"""TPU slices to compile for, by their Cloud names, and GPUs to predict for. No torch here."""

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Self

from tpukit.errors import ConfigError
from tpukit.io.units import GIB, parse_bytes
from tpukit.knowledge.accelerators import (
    UNNAMED_GPU,
    CompilerTarget,
    gpu_by_name,
    gpu_specs,
    gpu_target_name,
    peak_flops,
    tpu_by_cloud_name,
    tpu_generations,
)

GPU_NAME = re.compile(r"(?:([1-9]\d*)x)?([a-z][a-z0-9-]*|\d+(?:\.\d+)?gi?b)")
UNNAMED_CAPABILITY = 8.0
"""Compute capability of a GPU given by its memory alone."""


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


@dataclass(frozen=True)
class GpuRates:
    """Peak rates of a GPU in one precision; None: unknown."""

    flops_per_second: float | None
    bytes_per_second: float | None
    link_bytes_per_second: float | None = None
    approximate: str | None = "predicted from the step's tensors; nothing was executed"


@dataclass(frozen=True)
class GpuTarget:
    """GPUs of one kind to predict a batch for."""

    name: str
    devices: int
    memory_bytes: int
    """Memory of one GPU as torch reports it."""
    capability: float
    context_bytes: tuple[int, int]
    """Least and most that CUDA's context takes of it."""
    driver_name: str | None = None
    """None: given by its memory alone."""
    generation: GpuRates = GpuRates(None, None)

    def at(self, precision: str) -> Self:
        """The target with the peak rates of a precision."""
        if self.driver_name is None:
            return self
        flops = peak_flops(self.driver_name, precision) or peak_flops(self.driver_name, "fp32")
        return replace(self, generation=replace(self.generation, flops_per_second=flops))


def find_gpu(name: str) -> GpuTarget | None:
    """The GPUs of `t4`, `2xt4` or `24GB`; None where the name is none of a GPU.

    Raises:
        ConfigError: the memory is below 1 GiB.
    """
    match = GPU_NAME.fullmatch(name.strip().lower())
    if match is None:
        return None
    devices, kind = int(match[1] or 1), match[2]
    spec = gpu_specs().get(kind)
    if spec:
        name = f"{devices}x{kind}" if devices > 1 else kind
    elif kind[0].isdigit():
        spec = replace(UNNAMED_GPU, memory_gib=parse_bytes(kind) / GIB)
    else:
        return None
    if spec.memory_gib < 1:
        raise ConfigError(
            f"--target {name}: less than 1 GiB of memory.", "Give a GPU's memory, as in 24GB.",
            id="no-target",
        )  # fmt: skip
    known = gpu_by_name(spec.driver_name) if spec.driver_name else None
    least, most = (int(gib * GIB) for gib in spec.context_gib)
    return GpuTarget(
        name,
        devices,
        int(spec.memory_gib * GIB),
        known.capability if known else UNNAMED_CAPABILITY,
        (least, most),
        spec.driver_name,
        GpuRates(None, spec.bytes_per_second, spec.link_bytes_per_second),
    )


def gpu_here(name: str, devices: int, memory_bytes: int) -> GpuTarget:
    """GPUs of this machine, by the driver's name and the memory of each."""
    known = gpu_target_name(name, memory_bytes / GIB) or f"{memory_bytes / GIB:.2f}GiB"
    found = find_gpu(f"{devices}x{known}")
    assert found is not None
    return found


def find_any(name: str) -> Target | GpuTarget:
    """The target of a name, a TPU's or a GPU's. Raises as `find_target` does."""
    return find_gpu(name) or find_target(name)


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
        names = [*target_names(), *gpu_specs()]
        similar = difflib.get_close_matches(
            name.lower(), names, n=3, cutoff=0.4 if name[-1:].isdigit() else 0.7
        )
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
