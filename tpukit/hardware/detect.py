"""Which accelerators a machine has, from the files of the kernel and the drivers.

The one detector: `doctor`, `train` and `probe-batch` all use it. It imports no torch and starts
nothing, except that `query_driver` may run nvidia-smi.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tpukit.hardware.host import Host
from tpukit.hardware.options import Kind
from tpukit.io.units import GIB
from tpukit.knowledge.accelerators import (
    GOOGLE_PCI_VENDOR,
    TpuGeneration,
    gpu_by_name,
    tpu_by_cloud_name,
    tpu_by_pci,
)

TPU_VARIABLES = ("ISTPUVM", "TPU_ACCELERATOR_TYPE", "TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES")
"""Set on TPU machines and in the containers that a TPU is passed into."""
EMULATED_KERNELS = "TPUKIT_EMULATED_KERNELS"
"""At 1, the emulation on CPU has a TPU's kernels too, in JAX's interpreter: slow."""
CHIP_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}
"""Chips of one host -> the rectangle of chips that libtpu uses."""
SMI_COMMAND = (
    "nvidia-smi",
    "--query-gpu=name,memory.total,driver_version,compute_cap",
    "--format=csv,noheader,nounits",
)
SMI_SECONDS = 8.0


@dataclass(frozen=True)
class TpuChips:
    """The TPU chips of a host."""

    generation: TpuGeneration | None
    """None where a TPU is here but its generation is not known."""
    chips: int

    @property
    def devices_per_chip(self) -> int:
        """Devices as torch counts them."""
        return self.generation.devices_per_chip if self.generation else 1

    @property
    def devices(self) -> int:
        return self.chips * self.devices_per_chip

    @property
    def name(self) -> str:
        return f"TPU {self.generation.name}" if self.generation else "TPU (unknown generation)"


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU."""

    index: int
    """Its place on the PCI bus, among the machine's GPUs."""
    name: str = "NVIDIA GPU"
    memory_bytes: int | None = None
    capability: float | None = None
    """CUDA's compute capability: 7.5 for a T4."""
    driver: str | None = None
    """The driver's version."""


@dataclass(frozen=True)
class Hardware:
    """The accelerators of a host."""

    kind: Kind
    """What `--hw auto` selects."""
    tpu: TpuChips | None
    gpus: tuple[Gpu, ...]
    """Those that CUDA_VISIBLE_DEVICES leaves to this process."""
    hidden_gpus: int
    """Those that it hides."""
    emulated: bool
    """Whether torch_xla emulates a TPU with virtual devices of the CPU: PJRT_DEVICE=CPU."""


def detect_hardware(host: Host) -> Hardware:
    """The accelerators of this host and what `--hw auto` selects."""
    tpu, gpus = _tpu(host), _gpus(host)
    visible = _visible(host.environment.get("CUDA_VISIBLE_DEVICES"), len(gpus))
    uses_tpu = host.environment.get("PJRT_DEVICE", "").upper() in ("", "TPU")
    return Hardware(
        kind="tpu" if tpu and uses_tpu else "gpu" if visible else "cpu",
        tpu=tpu,
        gpus=tuple(gpus[index] for index in visible),
        hidden_gpus=len(gpus) - len(visible),
        emulated=is_emulated(host.environment),
    )


def is_emulated(environment: Mapping[str, str]) -> bool:
    """Whether torch_xla is set to emulate a TPU with virtual devices of the CPU."""
    return environment.get("PJRT_DEVICE", "").upper() == "CPU"


def emulates_kernels(environment: Mapping[str, str]) -> bool:
    """Whether the emulation on CPU runs the kernels too."""
    return is_emulated(environment) and environment.get(EMULATED_KERNELS) == "1"


# -- TPUs ----------------------------------------------------------------------------------------
def _tpu(host: Host) -> TpuChips | None:
    """Chips on the PCI bus, or device files together with a TPU's variables."""
    found = _pci_generations(host)
    if found:
        return TpuChips(found[0], len(found))
    files = tpu_device_files(host)
    if files and any(host.environment.get(name) for name in TPU_VARIABLES):
        slice_name = host.environment.get("TPU_ACCELERATOR_TYPE", "")
        return TpuChips(tpu_by_cloud_name(slice_name.rpartition("-")[0]), len(files))
    return None


def _pci_generations(host: Host) -> list[TpuGeneration]:
    """The generation of every TPU chip on the PCI bus."""
    found = []
    for slot in host.names("/sys/bus/pci/devices"):
        folder = f"/sys/bus/pci/devices/{slot}"
        if (host.read(f"{folder}/vendor") or "").strip() == GOOGLE_PCI_VENDOR:
            device = (host.read(f"{folder}/device") or "").strip()
            subsystem = (host.read(f"{folder}/subsystem_device") or "").strip()
            generation = tpu_by_pci(device, subsystem)
            found += [generation] if generation else []
    return found


def tpu_device_files(host: Host) -> list[str]:
    """The TPU driver's device files: `/dev/accel0`, `/dev/vfio/0`."""
    accel = [f"/dev/{name}" for name in host.names("/dev") if re.fullmatch(r"accel\d+", name)]
    vfio = [f"/dev/vfio/{name}" for name in host.names("/dev/vfio") if name.isdigit()]
    return accel or vfio


# -- GPUs ----------------------------------------------------------------------------------------
def _gpus(host: Host) -> list[Gpu]:
    """The GPUs that the driver lists, else those that have a device file."""
    slots = host.names("/proc/driver/nvidia/gpus")
    if not slots:
        files = [name for name in host.names("/dev") if re.fullmatch(r"nvidia\d+", name)]
        return [Gpu(index) for index in range(len(files))]
    driver = driver_version(host)
    return [_listed_gpu(host, index, slot, driver) for index, slot in enumerate(slots)]


def _listed_gpu(host: Host, index: int, slot: str, driver: str | None) -> Gpu:
    text = host.read(f"/proc/driver/nvidia/gpus/{slot}/information") or ""
    match = re.search(r"^Model:\s*(.+)$", text, re.MULTILINE)
    name = match.group(1).strip() if match else "NVIDIA GPU"
    known = gpu_by_name(name)
    if known is None:
        return Gpu(index, name, driver=driver)
    return Gpu(index, name, known.memory_gib * GIB, known.capability, driver)


def _visible(variable: str | None, count: int) -> list[int]:
    """Indices of the GPUs that CUDA_VISIBLE_DEVICES leaves, as CUDA reads it."""
    if variable is None:
        return list(range(count))
    indices: list[int] = []
    for entry in (part.strip() for part in variable.split(",")):
        # CUDA ignores everything from the first invalid entry on.
        is_index = entry.isdigit() and int(entry) < count
        if not (is_index or entry.startswith(("GPU-", "MIG-"))) or len(indices) == count:
            break
        # Only the driver knows which GPU a UUID names: any one that is left stands for it.
        free = (index for index in range(count) if index not in indices)
        indices.append(int(entry) if is_index else next(free))
    return indices


def driver_version(host: Host) -> str | None:
    """The NVIDIA driver's version by its own file."""
    text = host.read("/proc/driver/nvidia/version") or ""
    match = re.search(r"Kernel Module\D*?(\d+\.[\d.]+)", text)
    return match.group(1) if match else None


def query_driver(host: Host, gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    """The same GPUs with name, memory and compute capability as nvidia-smi reports them."""
    lines = (host.run(SMI_COMMAND, SMI_SECONDS) or "").splitlines() if gpus else []
    reported = [_reported_gpu(index, line) for index, line in enumerate(lines)]
    return tuple(
        (reported[gpu.index] if gpu.index < len(reported) else None) or gpu for gpu in gpus
    )


def _reported_gpu(index: int, line: str) -> Gpu | None:
    fields = [field.strip() for field in line.split(",")]
    if len(fields) != 4 or not fields[0]:
        return None
    name, memory, driver, capability = fields
    known = gpu_by_name(name)
    return Gpu(
        index,
        name,
        int(memory) * 2**20 if memory.isdigit() else None,
        _number(capability) or (known.capability if known else None),
        driver or None,
    )


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
