"""What a user may ask of the hardware. No torch here: commands decide with it before any import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["tpu", "gpu", "cpu"]
Precision = Literal["bf16", "fp16", "fp32"]


@dataclass(frozen=True)
class HardwareOptions:
    """What a user may ask for; `tpukit.hardware.select` turns it into a backend."""

    hw: Literal["auto", "tpu", "gpu", "cpu"] = "auto"
    devices: int | None = None
    """Devices of this host to use; None takes all that are there (one process on a CPU)."""
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    shard: bool = False
    """Shard parameters and optimizer state over the devices."""
    compile: bool | None = None
    """torch.compile; None lets the backend decide where it pays."""
    deterministic: bool = False
    memory_limit: int | None = None
    """Bytes; a real limit on CPUs (eager and XLA), for rehearsals."""
    master_port: int | None = None
