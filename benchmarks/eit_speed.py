"""Training steps and sampling of the EIT network: its lean form against its published form.

    python benchmarks/eit_speed.py --rounds 3 --out benchmarks/results/eit_speed_cpu.json

Both forms in turn, in one process on one machine, at the same precision, with and without
torch.compile. The published form runs timm's arithmetic and torch's fused attention. A step is
forward, backward, clipping, Adam and EMA, through the engine.
"""

import argparse
import gc
import json
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from deciding_code import write_result
from torch import nn

from tpukit.hardware.backend import ModelOps
from tpukit.hardware.options import HardwareOptions
from tpukit.hardware.select import open_backend, prepare_environment
from tpukit.tasks.eit.model.diffusion import View
from tpukit.tasks.eit.model.network import reference_network
from tpukit.tasks.eit.task import EITTask
from tpukit.train.config import TrainConfig
from tpukit.train.learner import build_learner

Precision = Literal["fp32", "bf16"]


class PublishedForm(EITTask):
    """The EIT task with its network in published form, at any size."""

    def build_model(self, ops: ModelOps) -> nn.Module:
        return reference_network(self.config.network)


@dataclass(frozen=True)
class Side:
    """One form of the network at one precision."""

    form: Literal["lean", "published"]
    precision: Precision
    compiled: bool

    @property
    def setting(self) -> str:
        return self.precision + (" compiled" if self.compiled else "")

    @property
    def name(self) -> str:
        return f"{self.form} {self.setting}"


def measure(side: Side, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each step and of sampling, and the first step's loss."""
    hardware = HardwareOptions(hw=options.hw, precision=side.precision, compile=side.compiled)
    prepare_environment(hardware)
    backend = open_backend(hardware)
    task = (EITTask if side.form == "lean" else PublishedForm)(size=options.size)
    torch.manual_seed(0)
    model = task.build_model(backend)
    disturb(model)
    learner = build_learner(task, backend, model, TrainConfig(ema_decay=0.995, ema_every=10))
    (batch,) = backend.batches(task.example_batches(options.rows))
    steps, losses = [], []
    for _ in range(1 + options.steps):
        started = time.perf_counter()
        learner.train_step([batch], lr=1e-5)
        losses.append(learner.read_metrics().means["loss"])
        steps.append(time.perf_counter() - started)
    result = {
        "step_seconds": steps[1:],
        "sampling_seconds": [sample(task, learner.model, backend, options)],
        "first_loss": losses[0],
    }
    backend.close()
    return result


def disturb(model: nn.Module) -> None:
    """Values in place of the zeros a fresh network has, the same for both forms."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)


def sample(task: EITTask, model: Any, backend: Any, options: argparse.Namespace) -> float:
    """Seconds of 5-step sampling of as many images as a batch has rows, after once to warm up."""
    maps = task.example_batches(options.rows)[0]["voltages"].numpy()
    sampler = task.trained(model, backend).sampler(options.rows)
    model.eval()
    for _ in range(2):
        started = time.perf_counter()
        sampler.reconstruct(model, backend, [View(maps)], 1)
        seconds = time.perf_counter() - started
    return seconds


def lean_over_published(
    sides: Sequence[Side], found: dict[str, dict[str, Any]]
) -> dict[str, dict[str, float]]:
    """The lean form's fastest time over the published form's, by precision and compilation."""
    ratios = {}
    for setting in dict.fromkeys(side.setting for side in sides):
        lean, published = found[f"lean {setting}"], found[f"published {setting}"]
        ratios[setting] = {
            "step": min(lean["step_seconds"]) / min(published["step_seconds"]),
            "sampling": min(lean["sampling_seconds"]) / min(published["sampling_seconds"]),
            "loss_difference": abs(lean["first_loss"] / published["first_loss"] - 1),
        }
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hw", default="cpu", choices=["cpu", "gpu"])
    parser.add_argument("--size", default="published", choices=["tiny", "small", "published"])
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2, help="timed steps per side and round")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    sides = [
        Side(form, precision, compiled)
        for compiled in (False, True)
        for precision in options.precisions
        for form in ("lean", "published")
    ]
    found: dict[str, dict[str, Any]] = {}
    for _ in range(options.rounds):
        for side in sides:
            result = measure(side, options)
            gc.collect()
            torch.compiler.reset()
            print(side.name, json.dumps(result), file=sys.stderr, flush=True)
            kept = found.setdefault(side.name, {**asdict(side), **result})
            if kept["step_seconds"] is not result["step_seconds"]:
                kept["step_seconds"] += result["step_seconds"]
                kept["sampling_seconds"] += result["sampling_seconds"]
    report = {
        "question": "time of the lean form over the published form's, at the same precision",
        "size": options.size,
        "rows": options.rows,
        "rounds": options.rounds,
        "hardware": cpu_name() if options.hw == "cpu" else torch.cuda.get_device_name(),
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "sides": found,
        "lean_over_published": lean_over_published(sides, found),
    }
    if options.out:
        write_result(options.out, report)
    print(json.dumps(report, indent=2))


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


if __name__ == "__main__":
    main()
