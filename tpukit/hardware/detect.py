"""Which accelerators this machine has, by its device files: nothing is started or imported."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

GOOGLE_VENDOR = "0x1ae0"
TPU_DEVICES = {
    "0x0027": "v2 or v3",
    "0x005e": "v4",
    "0x0062": "v5p",
    "0x0063": "v5e",
    "0x006f": "v6e",
    "0x0076": "v7x",
}
"""PCI device number -> generation."""

TPU_VARIABLES = ("ISTPUVM", "TPU_ACCELERATOR_TYPE", "TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES")


def tpu_chips(root: Path = Path("/")) -> int:
    """TPU chips of this host on the PCI bus."""
    devices = (root / "sys/bus/pci/devices").glob("*")
    return sum(
        _text(device / "vendor") == GOOGLE_VENDOR and _text(device / "device") in TPU_DEVICES
        for device in devices
    )


def has_tpu(environment: Mapping[str, str] = os.environ, root: Path = Path("/")) -> bool:
    """Whether a TPU is here: on the bus, or passed into this container with its variables."""
    if tpu_chips(root):
        return True
    device_files = [*(root / "dev").glob("accel[0-9]*"), *(root / "dev/vfio").glob("[0-9]*")]
    return bool(device_files) and any(name in environment for name in TPU_VARIABLES)


def gpu_count(environment: Mapping[str, str] = os.environ, root: Path = Path("/")) -> int:
    """NVIDIA GPUs that this process may see."""
    listed = len(list((root / "proc/driver/nvidia/gpus").glob("*")))
    count = listed or len(list((root / "dev").glob("nvidia[0-9]*")))
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return count
    # CUDA stops reading at the first entry that is no device.
    names = [name.strip() for name in visible.split(",")]
    valid = next((i for i, name in enumerate(names) if name in ("", "-1")), len(names))
    return min(count, valid)


def is_rehearsal() -> bool:
    """Whether torch_xla is told to run on virtual devices of the CPU."""
    return os.environ.get("PJRT_DEVICE", "").upper() == "CPU"


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
