"""Which of the two stacks drives a TPU here: torch_xla or torch_tpu. Imports neither, nor torch."""

import importlib.metadata
import importlib.util
from typing import Literal

from tpukit.errors import HardwareError
from tpukit.hardware.detect import Hardware, TpuChips
from tpukit.hardware.host import Host
from tpukit.knowledge.versions import parse_version, version_table

TpuStack = Literal["torch_xla", "torch_tpu"]
AUTOLOAD_VARIABLE = "TORCH_DEVICE_BACKEND_AUTOLOAD"
"""At 0, `import torch` leaves torch_tpu alone: without a TPU a CPU's first backward would hang."""
RANKS_VARIABLE = "TPUKIT_TORCH_TPU_RANKS"
"""Ranks of this host: the launcher sets variables that torch_tpu reads in each."""
RANK_COUNTS = {"v5e": (1, 4, 8), "v6e": (1, 4, 8)}
"""Ranks of one host that torch_tpu has a topology for; one a device."""
OTHER_RANK_COUNTS = (1, 2, 4, 8)


def installed_stack() -> TpuStack | None:
    """The stack of this environment; of both, the one that the installed torch belongs to."""
    found = [name for name in ("torch_xla", "torch_tpu") if importlib.util.find_spec(name)]
    if len(found) == 2:
        oldest = parse_version(version_table()["torch_tpu"]["torch"][0])
        is_newer = parse_version(importlib.metadata.version("torch")) >= oldest
        return "torch_tpu" if is_newer else "torch_xla"
    return None if not found else "torch_tpu" if found == ["torch_tpu"] else "torch_xla"


def choose_stack(hardware: Hardware, host: Host) -> TpuStack:
    """The stack that is installed, where it can drive what is here.

    Raises:
        HardwareError: there is no TPU and no emulation of one, or this stack cannot use it.
    """
    stack = installed_stack()
    if stack == "torch_tpu" and (hardware.emulated or hardware.tpu is None):
        raise HardwareError(
            f"--hw tpu: {'PJRT_DEVICE=CPU is set' if hardware.emulated else 'no TPU is here'}, and "
            "torch_tpu runs on TPUs only.",
            "`probe-batch --target v5e-1` asks the TPU compiler. Emulation on CPU "
            "(PJRT_DEVICE=CPU) and slices of several devices need torch_xla: tpukit with [tpu] in "
            "an environment of its own. --hw cpu runs on the CPU.",
            id="no-tpu",
        )
    if not hardware.emulated and hardware.tpu is None:
        raise HardwareError(
            "--hw tpu: there is no TPU on this machine.",
            "Set PJRT_DEVICE=CPU CPU_NUM_DEVICES=8 for emulation on CPU (8 virtual devices), or "
            "ask the TPU compiler: `tpukit probe-batch --target v5e-8`.",
            id="no-tpu",
        )
    if stack is None:
        raise HardwareError(
            "--hw tpu: torch_xla is not installed, nor is torch_tpu.",
            "pip install '.[tpu]' in a checkout of tpukit (or its wheel with [tpu]) on a TPU "
            "machine; '.[xla]' for emulation on CPU (virtual devices); '.[torch-tpu]' for "
            "torch_tpu.",
            id="no-torch-xla",
        )
    if stack == "torch_tpu":
        _check_torch_tpu(hardware.tpu, host)
    return stack


def _check_torch_tpu(tpu: TpuChips | None, host: Host) -> None:
    """torch_tpu counts the chips of v4 and later that the kernel hands out through VFIO."""
    has_accel = any(name.startswith("accel") for name in host.names("/dev"))
    is_known = tpu is None or tpu.generation is None or tpu.generation.name not in ("v2", "v3")
    if is_known and (not has_accel or host.names("/dev/vfio")):
        return
    name = tpu.name if tpu else "TPU"
    raise HardwareError(
        f"--hw tpu: torch_tpu cannot use this {name}: it starts at v4 and needs /dev/vfio.",
        "Use torch_xla here: install tpukit with [tpu] in an environment of its own.",
        id="torch-tpu-chip",
    )


def check_rank_count(devices: int, tpu: TpuChips) -> None:
    """Raises `HardwareError` where torch_tpu has no topology of that number of devices."""
    name = tpu.generation.name if tpu.generation else ""
    counts = [n for n in RANK_COUNTS.get(name, OTHER_RANK_COUNTS) if n <= tpu.devices]
    if devices not in counts:
        raise HardwareError(
            f"--devices {devices}: torch_tpu runs {', '.join(map(str, counts))} devices of this "
            "host.",
            f"Use --devices {min(counts, key=lambda n: abs(n - devices))}.",
        )
