"""From what a user asks to a backend. Imports no torch before `open_backend`."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

from tpukit.errors import HardwareError
from tpukit.hardware import detect
from tpukit.hardware.detect import is_rehearsal
from tpukit.hardware.options import HardwareOptions, Kind
from tpukit.hardware.precision import choose_precision

if TYPE_CHECKING:
    from tpukit.hardware.backend import Backend

CHIP_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}
"""Chips of one host -> the rectangle of them that libtpu is told to use."""


def open_backend(options: HardwareOptions) -> Backend:
    """The backend for these options.

    Raises:
        HardwareError: what was asked for is not here, or cannot do it.
    """
    kind = prepare_environment(options)
    if kind == "tpu":
        from tpukit.hardware.xla.backend import open_xla

        return open_xla(options)
    from tpukit.hardware.eager.backend import open_eager

    return open_eager(options, kind)


def find_kind(options: HardwareOptions) -> Kind:
    """Which hardware these options mean on this machine; nothing is started or imported.

    Raises:
        HardwareError: it is not here, or cannot do what was asked.
    """
    kind = _auto() if options.hw == "auto" else options.hw
    if kind == "tpu":
        _check_tpu(options)
    elif kind == "gpu":
        _check_gpu(options)
    if options.devices is not None and options.devices < 1:
        raise HardwareError(f"--devices {options.devices}: at least one device is needed.")
    return kind


def process_count(options: HardwareOptions, kind: Kind) -> int:
    """Processes a run on this host needs: one a GPU; one alone drives all devices of a TPU."""
    if kind == "gpu":
        return options.devices or detect.gpu_count()
    return (options.devices or 1) if kind == "cpu" else 1


def prepare_environment(options: HardwareOptions) -> Kind:
    """Sets what torch_xla, CUDA and accelerate read from the environment when they are imported."""
    kind = find_kind(options)
    if kind == "tpu":
        _prepare_xla(options)
    else:
        # accelerate would import torch_xla where it is installed, and then insist on it.
        os.environ["USE_TORCH_XLA"] = "0"
    if kind == "gpu":
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        if options.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return kind


def _auto() -> Kind:
    told = os.environ.get("PJRT_DEVICE", "TPU").upper() == "TPU"
    if told and detect.has_tpu():
        return "tpu"
    return "gpu" if detect.gpu_count() else "cpu"


def _check_tpu(options: HardwareOptions) -> None:
    choose_precision(options.precision, "tpu", native_bf16=True)
    if not is_rehearsal() and not detect.has_tpu():
        raise HardwareError(
            "--hw tpu: there is no TPU on this machine.",
            "PJRT_DEVICE=CPU CPU_NUM_DEVICES=8 in front of the command rehearses it on 8 virtual "
            "devices; `tpukit probe-batch --target v5e-8` asks the TPU compiler.",
            id="no-tpu",
        )
    if importlib.util.find_spec("torch_xla") is None:
        raise HardwareError(
            "--hw tpu: torch_xla is not installed.",
            "pip install '.[tpu]' in a checkout of tpukit (or its wheel with [tpu]) on a TPU "
            "machine; '.[xla]' for emulation on CPU (virtual devices).",
            id="no-torch-xla",
        )
    if options.memory_limit is not None and not is_rehearsal():
        raise HardwareError(
            "--memory-limit: a TPU's memory cannot be limited.",
            "Leave it out, or rehearse with PJRT_DEVICE=CPU.",
        )


def _check_gpu(options: HardwareOptions) -> None:
    count = detect.gpu_count()
    if count == 0:
        raise HardwareError(
            "--hw gpu: there is no GPU on this machine (or CUDA_VISIBLE_DEVICES hides it).",
            "`tpukit doctor` shows what is here; --hw cpu runs on the processor.",
            id="no-gpu",
        )
    if options.devices is not None and options.devices > count:
        raise HardwareError(f"--devices {options.devices}: this machine has {count} GPUs.")


def _prepare_xla(options: HardwareOptions) -> None:
    # XLA announces the end of its own partitioner several times a compilation.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if is_rehearsal():
        if options.devices is not None:
            os.environ["CPU_NUM_DEVICES"] = str(options.devices)
        return
    os.environ["PJRT_DEVICE"] = "TPU"
    # Notebook images set it to "local", which newer runtimes complain about.
    if os.environ.get("TPU_PROCESS_ADDRESSES") == "local":
        del os.environ["TPU_PROCESS_ADDRESSES"]
    if options.devices is not None:
        _limit_chips(options.devices)


def _limit_chips(devices: int) -> None:
    if devices not in CHIP_BOUNDS:
        raise HardwareError(
            f"--devices {devices}: a TPU host is split into 1, 2, 4 or 8 chips.",
            f"The nearest: --devices {min(CHIP_BOUNDS, key=lambda n: abs(n - devices))}.",
        )
    if devices == (detect.tpu_chips() or devices + 1):
        return
    os.environ["TPU_VISIBLE_CHIPS"] = ",".join(str(chip) for chip in range(devices))
    os.environ["TPU_CHIPS_PER_PROCESS_BOUNDS"] = CHIP_BOUNDS[devices]
    os.environ["TPU_PROCESS_BOUNDS"] = "1,1,1"
