"""All facts of a machine in one frozen object, gathered without importing torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tpukit.hardware.detect import (
    Hardware,
    detect_hardware,
    driver_version,
    query_driver,
    tpu_device_files,
)
from tpukit.hardware.host import Disk, Host, cuda_build
from tpukit.hardware.launch.holders import LOCK_FILE, Holder, find_holders

REPORTED = (
    "torch", "torch-xla", "torch-tpu", "libtpu", "libtpu-nightly", "jax", "jaxlib", "torchvision",
    "torchaudio", "tensorflow", "tensorflow-cpu", "accelerate", "timm", "transformers",
    "lightning", "pytorch-lightning", "tokenizers", "tiktoken", "safetensors", "numpy", "triton",
    "tpu-info", "tpukit",
)  # fmt: skip
_CLOUDS = (
    ("Google Compute Engine", "Google Cloud"),
    ("Google", "Google Cloud"),
    ("Amazon EC2", "Amazon EC2"),
    ("Microsoft Corporation", "Azure"),
    ("OpenStack", "OpenStack"),
)
_NO_LIMIT = 1 << 60


@dataclass(frozen=True)
class Provider:
    """Who provides a machine: a notebook service, a cloud, a cluster, or nobody."""

    name: str
    notebook: bool = False
    """Whether commands are typed into cells."""


@dataclass(frozen=True)
class CpuFacts:
    """The CPU of a machine."""

    name: str
    cores: float
    """Number that this process may use, within the share of its container."""
    flags: frozenset[str]


@dataclass(frozen=True)
class Facts(Hardware):
    """The hardware and software of a machine."""

    holders: tuple[Holder, ...]
    """Processes that have the TPU open."""
    lock_file: bool
    """Whether libtpu's lock file is there."""
    virtual_devices: int
    """Number of virtual devices of the emulation: CPU_NUM_DEVICES."""
    driver: str | None
    """Version of NVIDIA's driver."""
    cpu: CpuFacts
    memory_bytes: int | None
    """Memory of the host, or of its container where that is less."""
    memory_limited: bool
    """Whether a container limits the memory."""
    shm: Disk | None
    disk: Disk | None
    place: Provider
    packages: Mapping[str, str]
    torch_cuda: str | None
    """The CUDA version torch was built for."""
    python: str
    system: str
    host: Host

    def version(self, package: str) -> str | None:
        """An installed distribution's version, by its normalised name."""
        return self.packages.get(package)

    def versions(self) -> dict[str, str]:
        """The versions that matter here."""
        found = {name: self.packages[name] for name in REPORTED if name in self.packages}
        return {"python": self.python, **found}


def gather(host: Host, *, quick: bool, folder: str = ".") -> Facts:
    """Collects the facts of a host. `folder` is where checkpoints will lie."""
    hardware = detect_hardware(host)
    tpu, gpus = hardware.tpu, hardware.gpus
    if not quick or any(gpu.capability is None for gpu in gpus):
        gpus = query_driver(host, gpus)
    memory, limited = _memory(host)
    return Facts(
        **{**vars(hardware), "gpus": gpus},
        holders=find_holders(host, [*tpu_device_files(host), LOCK_FILE]) if tpu else (),
        lock_file=tpu is not None and host.exists(LOCK_FILE),
        virtual_devices=_virtual_devices(host) if hardware.emulated else 1,
        driver=next((gpu.driver for gpu in gpus if gpu.driver), None) or driver_version(host),
        cpu=_cpu(host),
        memory_bytes=memory,
        memory_limited=limited,
        shm=host.disk("/dev/shm") if host.exists("/dev/shm") else None,
        disk=host.disk(folder),
        place=provider_of(host),
        packages=host.packages(),
        torch_cuda=cuda_build(host.package_text("torch/version.py")),
        python=host.python,
        system=host.system,
        host=host,
    )


def _virtual_devices(host: Host) -> int:
    text = host.environment.get("CPU_NUM_DEVICES", "")
    return max(int(text), 1) if text.isdecimal() else 1


def _cpu(host: Host) -> CpuFacts:
    text = host.read("/proc/cpuinfo") or ""
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    name = re.search(r"^(?:model name|Model|Hardware)\s*:\s*(.+)$", text, re.MULTILINE)
    granted = _granted_cores(host)
    return CpuFacts(
        name.group(1).strip() if name else host.system,
        min(host.cores, granted) if granted else host.cores,
        frozenset(flags.group(1).split()) if flags else frozenset(),
    )


def _granted_cores(host: Host) -> float | None:
    """The container's share of the cores (control groups, version 2 then 1)."""
    quota, _, period = (host.read("/sys/fs/cgroup/cpu.max") or "").strip().partition(" ")
    if not quota:
        quota = (host.read("/sys/fs/cgroup/cpu/cpu.cfs_quota_us") or "").strip()
        period = (host.read("/sys/fs/cgroup/cpu/cpu.cfs_period_us") or "").strip()
    if not quota.isdigit() or not period.isdigit() or period == "0":
        return None
    return int(quota) / int(period)


def _memory(host: Host) -> tuple[int | None, bool]:
    match = re.search(r"^MemTotal:\s*(\d+) kB", host.read("/proc/meminfo") or "", re.MULTILINE)
    total = int(match.group(1)) * 1024 if match else None
    files = ("memory.max", "memory/memory.limit_in_bytes")
    limits = ((host.read(f"/sys/fs/cgroup/{file}") or "").strip() for file in files)
    limit = next((int(text) for text in limits if text.isdigit()), _NO_LIMIT)
    if total is None:
        return (limit, True) if limit < _NO_LIMIT else (None, False)
    return min(total, limit), limit < total


def provider_of(host: Host) -> Provider:
    """The most specific place that its files and variables show."""
    environment = host.environment
    if "KAGGLE_KERNEL_RUN_TYPE" in environment or host.exists("/kaggle/working"):
        return Provider("Kaggle", notebook=True)
    if "COLAB_RELEASE_TAG" in environment or "COLAB_GPU" in environment:
        return Provider("Colab", notebook=True)
    if "SAGEMAKER_INTERNAL_IMAGE_URI" in environment:
        return Provider("SageMaker", notebook=True)
    if "SLURM_JOB_ID" in environment:
        return Provider("Slurm")
    if "KUBERNETES_SERVICE_HOST" in environment:
        return Provider("Kubernetes")
    return Provider(_cloud(host) or ("container" if host.exists("/.dockerenv") else "this machine"))


def _cloud(host: Host) -> str | None:
    for file in ("product_name", "sys_vendor"):
        text = host.read(f"/sys/class/dmi/id/{file}") or ""
        for mark, name in _CLOUDS:
            if text.startswith(mark):
                return name
    return None
