"""Selects the hardware of a run and opens its backend. Imports no torch before `open_backend`."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

from tpukit.errors import HardwareError
from tpukit.hardware.detect import Hardware, TpuChips, detect_hardware
from tpukit.hardware.host import RealHost
from tpukit.hardware.options import HardwareOptions, Kind, choose_precision

if TYPE_CHECKING:
    from tpukit.hardware.backend import Backend

CHIP_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}
"""Chips of one host -> the rectangle of them that libtpu is told to use."""


def open_backend(options: HardwareOptions) -> Backend:
    """The backend for these options.

    Raises:
        HardwareError: the hardware is not here, or cannot do what the options ask for.
    """
    kind = prepare_environment(options)
    if kind == "tpu":
        from tpukit.hardware.xla.backend import open_xla

        return open_xla(options)
    from tpukit.hardware.eager.backend import open_eager

    return open_eager(options, kind)


def find_kind(options: HardwareOptions) -> Kind:
    """The hardware that these options select on this machine; nothing is started or imported.

    Raises:
        HardwareError: it is not here, or cannot do what the options ask for.
    """
    return _check(options, _this_machine())


def rank_count(options: HardwareOptions, kind: Kind) -> int:
    """Ranks of a run on this host: one a GPU; a single one drives all devices of a TPU."""
    if kind == "gpu":
        return options.devices or len(_this_machine().gpus)
    return (options.devices or 1) if kind == "cpu" else 1


def prepare_environment(options: HardwareOptions) -> Kind:
    """Sets what torch_xla, CUDA and accelerate read from the environment at import."""
    hardware = _this_machine()
    kind = _check(options, hardware)
    if kind == "tpu":
        _prepare_xla(options, hardware)
    else:
        # accelerate would import torch_xla where it is installed, and then insist on it.
        os.environ["USE_TORCH_XLA"] = "0"
    if kind == "gpu":
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        if options.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return kind


def _this_machine() -> Hardware:
    return detect_hardware(RealHost())


def _check(options: HardwareOptions, hardware: Hardware) -> Kind:
    kind = hardware.kind if options.hw == "auto" else options.hw
    if kind == "tpu":
        _check_tpu(options, hardware)
    elif kind == "gpu":
        _check_gpu(options, hardware)
    if options.devices is not None and options.devices < 1:
        raise HardwareError(
            f"--devices {options.devices}: at least one device is needed.", "Use --devices 1."
        )
    return kind


def _check_tpu(options: HardwareOptions, hardware: Hardware) -> None:
    choose_precision(options.precision, "tpu", native_bf16=True)
    if not hardware.emulated and hardware.tpu is None:
        raise HardwareError(
            "--hw tpu: there is no TPU on this machine.",
            "Set PJRT_DEVICE=CPU CPU_NUM_DEVICES=8 for emulation on CPU (8 virtual devices), or "
            "ask the TPU compiler: `tpukit probe-batch --target v5e-8`.",
            id="no-tpu",
        )
    if importlib.util.find_spec("torch_xla") is None:
        raise HardwareError(
            "--hw tpu: torch_xla is not installed.",
            "pip install '.[tpu]' in a checkout of tpukit (or its wheel with [tpu]) on a TPU "
            "machine; '.[xla]' for emulation on CPU (virtual devices).",
            id="no-torch-xla",
        )
    if options.memory_limit is not None and not hardware.emulated:
        raise HardwareError(
            "--memory-limit: a TPU's memory cannot be limited.",
            "Leave it out, or set PJRT_DEVICE=CPU for emulation on CPU.",
        )


def _check_gpu(options: HardwareOptions, hardware: Hardware) -> None:
    count = len(hardware.gpus)
    if count == 0:
        hidden = f" ({hardware.hidden_gpus} hidden by CUDA_VISIBLE_DEVICES)"
        raise HardwareError(
            f"--hw gpu: there is no GPU on this machine{hidden if hardware.hidden_gpus else ''}.",
            "Run `tpukit doctor` to see the hardware; --hw cpu runs on the CPU.",
            id="no-gpu",
        )
    if options.devices is not None and options.devices > count:
        raise HardwareError(
            f"--devices {options.devices}: this machine has {count} GPUs.",
            f"Use --devices {count}.",
        )


def _prepare_xla(options: HardwareOptions, hardware: Hardware) -> None:
    # XLA logs the end of its own partitioner several times a compilation.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if hardware.tpu is None or hardware.emulated:
        if options.devices is not None:
            os.environ["CPU_NUM_DEVICES"] = str(options.devices)
        return
    os.environ["PJRT_DEVICE"] = "TPU"
    # Notebook images set it to "local", which newer runtimes complain about.
    if os.environ.get("TPU_PROCESS_ADDRESSES") == "local":
        del os.environ["TPU_PROCESS_ADDRESSES"]
    if options.devices is not None:
        _limit_chips(options.devices, hardware.tpu)


def _limit_chips(devices: int, tpu: TpuChips) -> None:
    chips, rest = divmod(devices, tpu.devices_per_chip)
    if rest or chips not in CHIP_BOUNDS:
        possible = [n * tpu.devices_per_chip for n in CHIP_BOUNDS]
        raise HardwareError(
            f"--devices {devices}: invalid number of TPU devices; a host is split into 1, 2, 4 or"
            " 8 chips.",
            f"Use --devices {min(possible, key=lambda n: abs(n - devices))}.",
        )
    if devices == tpu.devices:
        return
    os.environ["TPU_VISIBLE_CHIPS"] = ",".join(str(chip) for chip in range(chips))
    os.environ["TPU_CHIPS_PER_PROCESS_BOUNDS"] = CHIP_BOUNDS[chips]
    os.environ["TPU_PROCESS_BOUNDS"] = "1,1,1"
