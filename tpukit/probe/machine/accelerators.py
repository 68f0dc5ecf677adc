"""TPUs and GPUs, by the files that the kernel and the drivers show."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tpukit.hardware.host import Host
from tpukit.knowledge.accelerators import (
    GOOGLE_PCI_VENDOR,
    TpuKind,
    gpu_by_name,
    tpu_by_accelerator_type,
    tpu_by_pci,
)

LOCK_FILE = "/tmp/libtpu_lockfile"
_SMI = (
    "nvidia-smi",
    "--query-gpu=name,memory.total,driver_version,compute_cap",
    "--format=csv,noheader,nounits",
)
SMI_SECONDS = 8.0


@dataclass(frozen=True)
class Holder:
    """A process that has a device or libtpu's lock file open."""

    pid: int
    name: str
    path: str
    is_own_kernel: bool
    """The notebook kernel that this process runs in."""


@dataclass(frozen=True)
class TpuFacts:
    """The TPU chips of this host."""

    kind: TpuKind | None
    """None where a TPU is here but its generation is not known."""
    chips: int
    holders: tuple[Holder, ...]
    lock_file: bool
    """Whether libtpu's lock file is there."""

    @property
    def devices(self) -> int:
        """Devices as torch counts them."""
        return self.chips * (self.kind.devices_per_chip if self.kind else 1)

    @property
    def name(self) -> str:
        return f"TPU {self.kind.generation}" if self.kind else "TPU (unknown generation)"


@dataclass(frozen=True)
class GpuFacts:
    """One GPU."""

    name: str
    memory_bytes: int | None
    capability: float | None
    """CUDA's compute capability: 7.5 for a T4."""
    driver: str | None


def tpu_facts(host: Host) -> TpuFacts | None:
    """The TPU of this host; None where there is none."""
    kinds = _pci_kinds(host)
    files = device_files(host)
    named = tpu_by_accelerator_type(host.environment.get("TPU_ACCELERATOR_TYPE", ""))
    says_tpu = named is not None or bool(host.environment.get("ISTPUVM"))
    if not kinds and not (files and says_tpu):
        return None
    kind = kinds[0] if kinds else named
    chips = len(kinds) or len(files)
    holders = tuple(_holders(host, [*files, LOCK_FILE]))
    return TpuFacts(kind, chips, holders, host.exists(LOCK_FILE))


def _pci_kinds(host: Host) -> list[TpuKind]:
    """The generation of every TPU chip on the PCI bus."""
    kinds = []
    for slot in host.names("/sys/bus/pci/devices"):
        folder = f"/sys/bus/pci/devices/{slot}"
        if (host.read(f"{folder}/vendor") or "").strip() == GOOGLE_PCI_VENDOR:
            device = (host.read(f"{folder}/device") or "").strip()
            subsystem = (host.read(f"{folder}/subsystem_device") or "").strip()
            kind = tpu_by_pci(device, subsystem)
            kinds += [kind] if kind else []
    return kinds


def device_files(host: Host) -> list[str]:
    """The TPU driver's device files: `/dev/accel0`, `/dev/vfio/0`."""
    accel = [f"/dev/{name}" for name in host.names("/dev") if re.fullmatch(r"accel\d+", name)]
    vfio = [f"/dev/vfio/{name}" for name in host.names("/dev/vfio") if name.isdigit()]
    return accel or vfio


def _holders(host: Host, paths: Sequence[str]) -> list[Holder]:
    """Processes that have one of these open, as far as /proc shows them to this user."""
    ancestors = _ancestors(host)
    found = []
    for name in host.names("/proc"):
        pid = int(name) if name.isdigit() else 0
        if pid and pid != host.process:
            path = _held_path(host, pid, paths)
            if path:
                program = process_name(host, pid)
                is_kernel = pid in ancestors and "ipykernel" in program
                found.append(Holder(pid, program, path, is_kernel))
    return found


def _held_path(host: Host, pid: int, paths: Sequence[str]) -> str | None:
    links = (host.link(f"/proc/{pid}/fd/{fd}") for fd in host.names(f"/proc/{pid}/fd"))
    return next((link for link in links if link in paths), None)


def process_name(host: Host, pid: int) -> str:
    """The first words of a process' command line."""
    command = (host.read(f"/proc/{pid}/cmdline") or "").replace("\0", " ").strip()
    return command[:80] or (host.read(f"/proc/{pid}/comm") or "?").strip()


def _ancestors(host: Host) -> set[int]:
    """This process' parents, up to the first."""
    pid, found = host.process, set[int]()
    while pid > 1 and pid not in found:
        found.add(pid)
        match = re.search(r"^PPid:\s*(\d+)", host.read(f"/proc/{pid}/status") or "", re.MULTILINE)
        pid = int(match.group(1)) if match else 0
    return found


def gpu_facts(host: Host, *, quick: bool) -> list[GpuFacts]:
    """The GPUs. `quick` takes memory and capability from the table where it knows the name."""
    listed = _listed_by_driver(host)
    if quick and listed and all(gpu.capability is not None for gpu in listed):
        return listed
    if not listed and not host.exists("/dev/nvidiactl") and not host.exists("/dev/nvidia0"):
        return []
    return _asked_of_smi(host) or listed


def driver_version(host: Host) -> str | None:
    """The NVIDIA driver's version by its own file."""
    match = re.search(r"Kernel Module\D*?(\d+\.[\d.]+)", _driver_text(host))
    return match.group(1) if match else None


def _driver_text(host: Host) -> str:
    return host.read("/proc/driver/nvidia/version") or ""


def _listed_by_driver(host: Host) -> list[GpuFacts]:
    driver, found = driver_version(host), []
    for slot in host.names("/proc/driver/nvidia/gpus"):
        text = host.read(f"/proc/driver/nvidia/gpus/{slot}/information") or ""
        match = re.search(r"^Model:\s*(.+)$", text, re.MULTILINE)
        name = match.group(1).strip() if match else "NVIDIA GPU"
        kind = gpu_by_name(name)
        memory = kind.memory_gib * 2**30 if kind else None
        found.append(GpuFacts(name, memory, kind.capability if kind else None, driver))
    return found


def _asked_of_smi(host: Host) -> list[GpuFacts]:
    found = []
    for line in (host.run(_SMI, SMI_SECONDS) or "").splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 4 and fields[0]:
            name, memory, driver, capability = fields
            known = gpu_by_name(name)
            found.append(
                GpuFacts(
                    name,
                    int(memory) * 2**20 if memory.isdigit() else None,
                    _number(capability) or (known.capability if known else None),
                    driver or None,
                )
            )
    return found


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
