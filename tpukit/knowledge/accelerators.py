"""TPU generations and GPU models: how to recognise them, and what they can do."""

import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

Support = Literal["native", "emulated", "none"]
GOOGLE_PCI_VENDOR = "0x1ae0"
_TABLE = Path(__file__).parent / "tables" / "devices.toml"


@dataclass(frozen=True)
class CompilerTarget:
    """What the TPU compiler counts as one device of a generation, and that device's peak rates."""

    memory_gib: float
    """HBM that programs may use, as the compiler reports it."""
    flops_per_second: float
    """bf16 operations."""
    bytes_per_second: float
    """HBM bandwidth."""
    counts: Literal["chips", "cores"]
    """What the number in a Cloud name counts."""
    topologies: dict[int, str]
    """The number in a Cloud name -> libtpu's topology."""
    link_bytes_per_second: float | None = None
    """Bandwidth between devices, all links and both directions; None where it is not published."""
    devices_per_count: float = 1.0
    approximate: str | None = None
    """Why the compiler's answer differs from this TPU's, where it does."""


@dataclass(frozen=True)
class TpuGeneration:
    """A TPU generation. A device is what torch counts: a chip, or a core of one."""

    name: str
    devices_per_chip: int
    memory_gib: int
    """HBM of one device."""
    pci_device: str
    cloud_names: tuple[str, ...]
    """How Cloud names of this generation start; the first is tpukit's own."""
    device_kinds: tuple[str, ...]
    """The runtime's names of a device."""
    has_kernels: bool
    """Whether a core runs tpukit's Pallas kernels."""
    pci_subsystem: str | None = None
    compiler: CompilerTarget | None = None
    """None where the compiler has no topology of it."""


@dataclass(frozen=True)
class GpuKind:
    """A GPU model by the driver's name."""

    capability: float
    memory_gib: int


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(_TABLE.read_text(encoding="utf-8"))


@cache
def tpu_generations() -> tuple[TpuGeneration, ...]:
    """All known generations, the oldest first."""
    return tuple(_generation(row) for row in _table()["tpu"])


def _generation(row: Mapping[str, Any]) -> TpuGeneration:
    names = {key: tuple(row[key]) for key in ("cloud_names", "device_kinds")}
    compiler = None
    if "compiler" in row:
        topologies = {int(count): name for count, name in row["compiler"]["topologies"].items()}
        compiler = CompilerTarget(**{**row["compiler"], "topologies": topologies})
    return TpuGeneration(**{**row, **names, "compiler": compiler})


def tpu_by_pci(device: str, subsystem: str | None) -> TpuGeneration | None:
    """The generation of a PCI function of Google's; None for another device (a network card)."""
    for generation in tpu_generations():
        if generation.pci_device == device and generation.pci_subsystem in (None, subsystem):
            return generation
    return None


def tpu_by_cloud_name(name: str) -> TpuGeneration | None:
    """The generation of a Cloud name without its number: `v5litepod`."""
    known = (g for g in tpu_generations() if name.strip().lower() in g.cloud_names)
    return next(known, None)


def tpu_by_device_kind(kind: str) -> TpuGeneration | None:
    """The generation of a device by the runtime's name for it: `TPU v5 lite`."""
    return next((g for g in tpu_generations() if kind in g.device_kinds), None)


@dataclass(frozen=True)
class GpuSpec:
    """A GPU that a batch is predicted for."""

    driver_name: str | None
    """None: given by its memory alone."""
    memory_gib: float
    """Total memory as torch reports it."""
    bytes_per_second: float | None
    context_gib: Sequence[float]
    """Least and most that CUDA's context takes."""
    link_bytes_per_second: float | None = None


UNNAMED_GPU = GpuSpec(None, 0.0, None, (0.3, 0.6))
"""A GPU of which nothing but its memory is known."""


def gpu_specs() -> dict[str, GpuSpec]:
    """GPUs by the names of targets."""
    return {name: GpuSpec(**row) for name, row in _table()["gpu_targets"].items()}


def gpu_target_name(name: str, memory_gib: float) -> str | None:
    """The target for the driver's name of a GPU: of several the nearest in memory."""
    known = {key: spec for key, spec in gpu_specs().items() if _is_part(spec.driver_name, name)}
    return min(known, key=lambda key: abs(known[key].memory_gib - memory_gib), default=None)


def gpu_by_name(name: str) -> GpuKind | None:
    """The model whose name is part of the driver's."""
    row = _gpu_row("gpu", name)
    return GpuKind(*row) if row else None


def peak_flops(name: str, precision: str) -> float | None:
    """Peak operations a second of a device by the runtime's or driver's name for it.

    None where it is unknown, as for fp32 on a TPU.
    """
    tpu = tpu_by_device_kind(name)
    if tpu is None:
        peaks = _gpu_row("gpu_peaks", name) or {}
        return peaks.get(precision)
    compiler = tpu.compiler
    if compiler is None or precision != "bf16":
        return None
    # A chip has two cores; torch and the compiler need not count the same devices.
    per_chip = 2 * compiler.devices_per_count if compiler.counts == "cores" else 1
    return compiler.flops_per_second * per_chip / tpu.devices_per_chip


def _gpu_row(table: str, name: str) -> Any:
    """What a table holds for the first of its names that is part of the driver's."""
    return next((row for part, row in _table()[table].items() if _is_part(part, name)), None)


def _is_part(part: str | None, name: str) -> bool:
    if part is None:
        return False
    padded = f" {name.replace('NVIDIA', '').replace('Tesla', '').strip()} ".replace("-", " ")
    return f" {part.replace('-', ' ')} " in padded


def gpu_bf16(capability: float) -> Support:
    """bf16 is native from compute capability 8.0 (Ampere) on; before, torch emulates it."""
    return "native" if capability >= 8.0 else "emulated"


def gpu_fp16(capability: float) -> Support:
    """fp16 arithmetic exists from 6.0 on, except that 6.1 runs it 64 times slower than fp32."""
    return "native" if capability >= 5.3 and capability not in (6.1, 6.2) else "emulated"


def cpu_bf16(flags: Collection[str]) -> Support:
    """Native with AVX512-BF16, AMX or Arm's bf16 instructions."""
    native = {"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"}
    return "native" if native & set(flags) else "emulated"


def cpu_fp16(flags: Collection[str]) -> Support:
    """Native with AVX512-FP16, AMX-FP16 or Arm's half-precision instructions."""
    return "native" if {"avx512_fp16", "amx_fp16", "fphp", "asimdhp"} & set(flags) else "emulated"
