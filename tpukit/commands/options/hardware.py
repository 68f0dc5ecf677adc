"""Hardware options of the commands that use a trained run: `test` and `predict`."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from tpukit.errors import ConfigError
from tpukit.hardware.options import HardwareOptions

CHOICES = {
    "hw": ("auto", "tpu", "gpu", "cpu"),
    "precision": ("auto", "bf16", "fp16", "fp32"),
}


@dataclasses.dataclass(frozen=True)
class UseHardware:
    """Where a trained run is used."""

    hw: Annotated[str, typer.Option(help="auto, tpu, gpu or cpu.")] = "auto"
    devices: Annotated[
        int | None, typer.Option("--devices", "--nproc", help="Devices to use (all).")
    ] = None
    precision: Annotated[str, typer.Option(help="auto, bf16, fp16, fp32.")] = "auto"
    master_port: Annotated[int | None, typer.Option(help="torchrun's port (a free one).")] = None

    def options(self) -> HardwareOptions:
        """Raises ConfigError for a value that is none of the choices."""
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(
                    f"--{name} {getattr(self, name)!r} is none of {', '.join(choices)}."
                )
        if self.devices is not None and self.devices < 1:
            raise ConfigError(f"--devices {self.devices} must be 1 or more.")
        return HardwareOptions(**dataclasses.asdict(self), compile=False)
