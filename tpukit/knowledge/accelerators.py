"""TPUs by PCI id, GPUs by name, and what each number format is on them."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

Support = Literal["native", "emulated", "none"]
GOOGLE_PCI_VENDOR = "0x1ae0"
_TABLE = Path(__file__).parent / "tables" / "devices.toml"


@dataclass(frozen=True)
class TpuKind:
    """A TPU generation. A device is what torch counts: a chip, or a core of one."""

    generation: str
    devices_per_chip: int
    memory_gib: int
    """Of one device."""
    pci_device: str
    accelerator_types: tuple[str, ...]
    """How cloud names of this generation start."""
    pci_subsystem: str | None = None


@dataclass(frozen=True)
class GpuKind:
    """A GPU model by the driver's name."""

    capability: float
    memory_gib: int


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(_TABLE.read_text(encoding="utf-8"))


def tpu_kinds() -> list[TpuKind]:
    """All generations that are known."""
    rows = (
        {**row, "accelerator_types": tuple(row["accelerator_types"])} for row in _table()["tpu"]
    )
    return [TpuKind(**row) for row in rows]


def tpu_by_pci(device: str, subsystem: str | None) -> TpuKind | None:
    """The generation of a PCI function of Google's; None for another device (a network card)."""
    for kind in tpu_kinds():
        if kind.pci_device == device and kind.pci_subsystem in (None, subsystem):
            return kind
    return None


def tpu_by_accelerator_type(name: str) -> TpuKind | None:
    """The generation that a cloud's name says: `v5litepod-8`."""
    names: Iterable[tuple[str, TpuKind]] = (
        (start, kind) for kind in tpu_kinds() for start in kind.accelerator_types
    )
    return next((kind for start, kind in names if name.lower().startswith(f"{start}-")), None)


def gpu_by_name(name: str) -> GpuKind | None:
    """The model whose name is part of the driver's."""
    padded = f" {name.replace('NVIDIA', '').replace('Tesla', '').strip()} ".replace("-", " ")
    for part, (capability, memory_gib) in _table()["gpu"].items():
        if f" {part.replace('-', ' ')} " in padded:
            return GpuKind(capability, memory_gib)
    return None


def gpu_bf16(capability: float) -> Support:
    """bf16 is native from compute capability 8.0 (Ampere) on; before, torch emulates it."""
    return "native" if capability >= 8.0 else "emulated"


def gpu_fp16(capability: float) -> Support:
    """fp16 arithmetic exists from 6.0 on, except that 6.1 runs it 64 times slower than fp32."""
    if capability in (6.1, 6.2):
        return "emulated"
    return "native" if capability >= 5.3 else "emulated"


def cpu_bf16(flags: Collection[str]) -> Support:
    """Native with AVX512-BF16, AMX or Arm's bf16 instructions."""
    return (
        "native"
        if {"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"} & set(flags)
        else "emulated"
    )


def cpu_fp16(flags: Collection[str]) -> Support:
    """Native with AVX512-FP16, AMX-FP16 or Arm's half-precision instructions."""
    return "native" if {"avx512_fp16", "amx_fp16", "fphp", "asimdhp"} & set(flags) else "emulated"
