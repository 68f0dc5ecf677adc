"""What a user may ask of the hardware. Imports no torch: commands decide with it before that."""

from dataclasses import dataclass
from typing import Literal

from tpukit.errors import HardwareError
from tpukit.io.ranges import Range, setting

Kind = Literal["tpu", "gpu", "cpu"]
Precision = Literal["bf16", "fp16", "fp32"]
OptimizerName = Literal["adamw", "adam", "sgd", "rmsprop", "adafactor", "lion", "adamw_8bit",
                        "paged_adamw", "paged_adamw_8bit"]  # fmt: skip

HARDWARE = "Hardware"
"""The panel of `--help` with these options."""


@dataclass(frozen=True)
class HardwareOptions:
    """What a user may ask for; `tpukit.hardware.select` turns it into a backend."""

    hw: Literal["auto", "tpu", "gpu", "cpu"] = setting("auto", panel=HARDWARE)
    """Hardware: auto, tpu, gpu or cpu."""
    devices: int | None = setting(None, Range(1, 4096), panel=HARDWARE)
    """Devices of this host to use (default: all; one process on a CPU)."""
    precision: Literal["auto", "bf16", "fp16", "fp32"] = setting("auto", panel=HARDWARE)
    """Precision of the forward pass: auto, bf16, fp16 or fp32; weights stay fp32."""
    shard: bool = setting(False, panel=HARDWARE)
    """Shard parameters and optimizer state over the devices."""
    sync_batchnorm: bool = False
    """BatchNorm normalizes by the rows of all ranks, not of each (on XLA it always does)."""
    compile: bool | None = setting(None, panel=HARDWARE)
    """Use torch.compile (default: on GPUs, but for the preset quick and under 500 steps)."""
    kernels: Literal["auto", "on", "off"] = setting("auto", panel=HARDWARE)
    """Own attention kernels on TPUs: auto (verified once per device type), on (without that
    check) or off (plain operations)."""
    step_mode: Literal["auto", "recorded", "traced"] = setting("auto", panel=HARDWARE)
    """Steps on TPUs: traced (the Python of every step runs), recorded (that of two; the others
    replay their program) or auto (recorded, verified once per device type)."""
    compile_cache: str | None = setting(None, panel=HARDWARE)
    """Folder for a TPU's compiled programs; a read-only one is read and not written."""
    deterministic: bool = setting(False, panel=HARDWARE)
    """Use deterministic kernels on GPUs, so that a resumed run is bit-equal there too."""
    memory_limit: int | None = setting(None, Range(1, 2**60), panel=HARDWARE, unit="SIZE")
    """Memory limit: of the process on a CPU, of each device on GPUs (4GB)."""
    max_restarts: int = setting(0, Range(0, 1000), panel=HARDWARE)
    """Restarts from the last checkpoint after a rank has failed."""
    collective_timeout: float = setting(
        1800.0, Range(1, 30 * 86400, whole=False), panel=HARDWARE, unit="DURATION"
    )
    """Longest time that a rank waits for the others, on GPUs and CPUs (default: 30m)."""
    master_port: int | None = setting(None, Range(1, 65535), panel=HARDWARE)
    """Port of torchrun (default: a free one)."""


def choose_precision(
    requested: Literal["auto", "bf16", "fp16", "fp32"], kind: Kind, *, native_bf16: bool
) -> Precision:
    """The precision of a forward pass: as requested, or the fastest that is native here."""
    if requested == "fp16" and kind == "tpu":
        raise HardwareError(
            "--precision fp16: TPUs do not support fp16.",
            "Use --precision bf16: as fast on a TPU, and it needs no gradient scaler.",
        )
    if requested != "auto":
        return requested
    if kind == "cpu":
        return "fp32"
    return "bf16" if kind == "tpu" or native_bf16 else "fp16"
