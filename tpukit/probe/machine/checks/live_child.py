"""The child of the live checks: opens the device, multiplies, trains a step, says how it went.

Started by `tpukit.hardware.launch.child` with HW DESCRIPTOR PARENT as its arguments; answers go to
that descriptor, so that what libraries print cannot get between them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, cast

from tpukit.errors import TpukitError
from tpukit.hardware.options import HardwareOptions
from tpukit.io.process import die_with_parent
from tpukit.probe.logs.matching import explain_text

if TYPE_CHECKING:
    from tpukit.hardware.backend import Backend, Precision

MATRIX = 256
LARGEST_ERROR = {"fp32": 2e-2, "bf16": 5e-2, "fp16": 2e-2}
"""Maximum error relative to the largest entry; a TPU multiplies fp32 in bf16 passes."""


Kind = Literal["auto", "tpu", "gpu", "cpu"]


def main(hw: Kind, descriptor: int, parent: int) -> int:
    """Runs every step until one fails; 1 then."""
    die_with_parent(parent)
    backend: list[Backend] = []
    steps: dict[str, Callable[[], str]] = {
        "torch-starts": _import_torch,
        "device-opens": lambda: _open(hw, backend),
        "matrix-product": lambda: check_products(backend[0]),
        "training-step": lambda: _train(backend[0]),
    }
    for name, step in steps.items():
        if not _send_result(descriptor, name, step):
            return 1
    return 0


def _send_result(descriptor: int, name: str, step: Callable[[], str]) -> bool:
    try:
        _say(descriptor, name, "pass", step(), None)
    except Exception as error:
        message, fix = explained(error)
        _say(descriptor, name, "fail", message, fix)
        return False
    return True


def explained(error: Exception) -> tuple[str, str]:
    """The message and the hint for an error."""
    if isinstance(error, TpukitError):
        return error.message, error.hint or "tpukit doctor --quick"
    text = " ".join(f"{type(error).__name__}: {error}".split())
    known = explain_text(text)
    if known is None:
        return text[:300], "tpukit doctor --quick    # versions and who holds the device"
    return f"{text[:160]}: {known.cause}", known.fix


def _say(descriptor: int, name: str, status: str, message: str, fix: str | None) -> None:
    answer = {"id": name, "status": status, "message": message, "fix": fix}
    os.write(descriptor, (json.dumps(answer) + "\n").encode())


def _import_torch() -> str:
    import torch

    return f"torch {torch.__version__}"


def _open(hw: Kind, opened: list[Backend]) -> str:
    import torch

    from tpukit.hardware.select import find_kind, open_backend

    # One GPU is enough here, and several would need a launcher.
    devices = 1 if find_kind(HardwareOptions(hw=hw)) == "gpu" else None
    backend = open_backend(HardwareOptions(hw=hw, devices=devices, compile=False))
    total = backend.to_host({"total": torch.ones(8, device=backend.device).sum()})["total"]
    if float(total) != 8.0:
        raise RuntimeError(f"eight ones add up to {float(total)} on {backend.device}")
    opened.append(backend)
    kind = backend.describe()["hardware"]
    return f"{kind} ({backend.device}), {backend.devices} devices, {backend.precision}"


def check_products(backend: Backend) -> str:
    """fp32 and the precision of training, each against float64 on the host."""
    import torch

    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(2, MATRIX, MATRIX, generator=generator)
    exact = left.double() @ right.double()
    wanted: tuple[Precision, ...] = ("fp32", "fp16" if backend.precision == "fp16" else "bf16")
    said = []
    for precision in wanted:
        with backend.autocast(precision):
            product = left.to(backend.device) @ right.to(backend.device)
        host = backend.to_host({"product": product.float()})["product"].double()
        error = float((host - exact).abs().max() / exact.abs().max())
        if not error <= LARGEST_ERROR[precision]:
            raise RuntimeError(f"{precision} differs from float64 by {error:.1e} of the largest")
        said.append(f"{precision} within {error:.0e}")
    return ", ".join(said)


def _train(backend: Backend) -> str:
    from tpukit.probe.machine.checks.live_step import train_one_step

    return train_one_step(backend)


if __name__ == "__main__":
    sys.exit(main(cast("Kind", sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
