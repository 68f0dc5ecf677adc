"""Processor seconds of one forward and backward pass of the full-width EIT network, on one thread.

    OMP_NUM_THREADS=1 python benchmarks/eit_cpu_seconds.py

Processor time on one thread hardly depends on what else the machine does; no optimizer, no warm-up.
`eit_speed.py` measures whole steps and sampling, on a quiet machine.
"""

from __future__ import annotations

import json
import platform
import time
from contextlib import nullcontext
from typing import Any

import torch

from tpukit.hardware.fake import FakeBackend
from tpukit.tasks.eit.model.lean import lean_network
from tpukit.tasks.eit.model.network import SIZES, reference_network

SIDES = (("lean", "bf16"), ("reference", "bf16"), ("reference", "fp32"))
ROWS = 2


def measure(form: str, precision: str) -> dict[str, Any]:
    """Both forms start from the same weights, none of them zero."""
    torch.manual_seed(0)
    config = SIZES["published"]
    network = (
        reference_network(config) if form == "reference" else lean_network(config, FakeBackend())
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, parameter in sorted(network.named_parameters()):
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
    inputs = torch.Generator().manual_seed(2)
    images = torch.randn(ROWS, 1, 128, 128, generator=inputs)
    maps = torch.randn(ROWS, 1, 16, 16, generator=inputs)
    times = torch.tensor([3.0, 900.0])
    autocast = torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else nullcontext()
    started = time.process_time()
    with autocast:
        loss = network(images, times, maps).float().square().mean()
    forward = time.process_time()
    loss.backward()
    ended = time.process_time()
    return {
        "form": form,
        "precision": precision,
        "forward": forward - started,
        "backward": ended - forward,
        "loss": loss.item(),
    }


def main() -> None:
    torch.set_num_threads(1)
    sides = [measure(*side) for side in SIDES]
    total = [side["forward"] + side["backward"] for side in sides]
    ratios = {
        f"{other['form']} {other['precision']}": {
            "forward_and_backward": total[0] / seconds,
            "forward": sides[0]["forward"] / other["forward"],
        }
        for other, seconds in zip(sides[1:], total[1:], strict=True)
    }
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    print(json.dumps({"rows": ROWS, "versions": versions, "cpu_seconds": sides,
                      "lean_over": ratios}, indent=2))  # fmt: skip


if __name__ == "__main__":
    main()
