"""Which arithmetic a forward pass gets."""

from __future__ import annotations

from typing import Literal

from tpukit.errors import HardwareError
from tpukit.hardware.options import Kind, Precision


def choose_precision(
    asked: Literal["auto", "bf16", "fp16", "fp32"], kind: Kind, *, native_bf16: bool
) -> Precision:
    """The arithmetic of a forward pass: as asked, or the fastest this hardware has natively."""
    if asked == "fp16" and kind == "tpu":
        raise HardwareError(
            "--precision fp16: TPUs have no fp16.",
            "Use --precision bf16: the same speed there, and it needs no gradient scaler.",
        )
    if asked != "auto":
        return asked
    if kind == "cpu":
        return "fp32"
    return "bf16" if kind == "tpu" or native_bf16 else "fp16"
