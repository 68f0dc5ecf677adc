"""Hardware options of the commands that use a trained run: `test` and `predict`."""

from __future__ import annotations

from typing import Annotated

from tpukit.commands.options.option_sets import Given, options_of
from tpukit.hardware.options import HardwareOptions
from tpukit.train.config import build

USED = ("hw", "devices", "precision", "shard", "kernels", "master_port")
UseHardware = Annotated[Given, options_of(HardwareOptions, {"Hardware": USED})]


def hardware_options(given: Given) -> HardwareOptions:
    """Raises ConfigError for values that are not allowed."""
    return build(HardwareOptions, {**given, "compile": False})
