"""Training steps and sampling of the full-width EIT network: lean form against published form.

    python benchmarks/eit_speed.py --out benchmarks/results/eit_speed_cpu.json

One process, one machine, both forms in turn. The published form runs with timm's arithmetic and
torch's fused attention, in fp32 and under bf16 autocast; the lean form in bf16. A step is forward,
backward, clipping, Adam and the average of the weights, through the engine.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tpukit.hardware.options import HardwareOptions
from tpukit.hardware.select import open_backend, prepare_environment
from tpukit.tasks.eit.task import EITTask
from tpukit.train.config import TrainConfig
from tpukit.train.step import build_learner


@dataclass(frozen=True)
class Side:
    """One form at one precision."""

    size: str
    precision: str
    compile: bool = False

    @property
    def name(self) -> str:
        return f"{self.size} {self.precision}" + (" compiled" if self.compile else "")


def measure(side: Side, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each step and of sampling, and the first step's loss."""
    hardware = HardwareOptions(
        hw=options.hw, precision=side.precision, compile=side.compile  # type: ignore[arg-type]
    )  # fmt: skip
    prepare_environment(hardware)
    backend = open_backend(hardware)
    task = EITTask(size=side.size)
    torch.manual_seed(0)
    model = task.build_model(backend)
    disturb(model)
    learner = build_learner(task, backend, model, TrainConfig(ema_decay=0.995, ema_every=10))
    (batch,) = backend.batches(task.example_batches(options.rows))
    steps, losses = [], []
    for _ in range(1 + options.steps):
        started = time.perf_counter()
        learner.train_step([batch], lr=1e-5)
        losses.append(learner.read_figures().values["loss"])
        steps.append(time.perf_counter() - started)
    memory = backend.memory()
    result = {
        "step_seconds": steps[1:],
        "first_loss": losses[0],
        "sampling_seconds": sample(task, learner.model, backend, options),
        "memory_bytes": memory.peak if memory else None,
    }
    backend.close()
    return result


def disturb(model: torch.nn.Module) -> None:
    """Values in place of the zeros a fresh network has, the same for both forms."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)


def sample(task: EITTask, model: Any, backend: Any, options: argparse.Namespace) -> list[float]:
    """Seconds of 5-step sampling of as many images as a batch has rows, after once to warm up."""
    maps = task.example_batches(options.rows)[0]["voltages"].numpy()
    sampler = task.sampler(options.rows)
    model.eval()
    seconds = []
    for _ in range(2):
        started = time.perf_counter()
        sampler.reconstruct(model, backend, maps, 1)
        seconds.append(time.perf_counter() - started)
    return seconds[1:]


def ratios(found: dict[str, dict[str, Any]], lean: str) -> dict[str, dict[str, float]]:
    """The lean form's time as a part of each other side's."""
    return {
        name: {
            "step": best(found[lean]["step_seconds"]) / best(side["step_seconds"]),
            "sampling": best(found[lean]["sampling_seconds"]) / best(side["sampling_seconds"]),
            "loss_difference": abs(found[lean]["first_loss"] / side["first_loss"] - 1),
        }
        for name, side in found.items()
        if name != lean
    }


def best(seconds: list[float]) -> float:
    return min(seconds)


def sides_of(options: argparse.Namespace) -> list[Side]:
    reference = [Side("published-reference", p) for p in options.reference_precisions]
    sides = [*reference, Side("published", "bf16")]
    if options.compiled:
        sides += [Side(side.size, side.precision, True) for side in sides]
    return sides


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hw", default="cpu", choices=["cpu", "gpu"])
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2, help="timed steps a side and round")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--reference-precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--compiled", action="store_true", help="each side with torch.compile too")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    for _ in range(options.rounds):
        for side in sides_of(options):
            result = measure(side, options)
            gc.collect()
            print(side.name, json.dumps(result), file=sys.stderr, flush=True)
            kept = found.setdefault(
                side.name, {**result, "step_seconds": [], "sampling_seconds": []}
            )
            for name in ("step_seconds", "sampling_seconds"):
                kept[name] += result[name]
    for side_result in found.values():
        side_result["median_step_seconds"] = statistics.median(side_result["step_seconds"])
    report = {
        "rows": options.rows,
        "hardware": processor() if options.hw == "cpu" else torch.cuda.get_device_name(),
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "sides": found,
        "lean_over": ratios(found, "published bf16"),
    }
    text = json.dumps(report, indent=2)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")
    print(text)


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


if __name__ == "__main__":
    main()
