"""What a training step on torch_xla costs the host: traced and recorded, in turn, in one process.

    python benchmarks/host_time.py [MODEL ...] [--devices 1 8] [--width full|narrow] [--rounds 4]
    python benchmarks/host_time.py --page

Processor time of the thread that trains, from the call of `train_step` to its return, on virtual
devices of the CPU; what other threads execute is left out, and nothing runs while it is measured.
The models have the depth of the published ones, and with `--width narrow` fewer channels: the
number of tensors and operators decides the time, not their size. Weights are random, batches
synthetic. Writes results/host_time.json;
--page writes docs/lab/host_time.md from it and results/tpu_batches.json.
"""

import argparse
import dataclasses
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from deciding_code import write_result

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "host_time.json"
PAGE = ROOT / "docs" / "lab" / "host_time.md"
QUICK = {"XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"}
"""Of the programs only the host's time is measured: they need not be fast, and compile sooner."""
TRACED, RECORDED = 3, 6
"""Measured steps of each kind in a round; one before them warms caches."""
LORA = {"lora_rank": 16, "lora_targets": "qkv,attention_out,mlp_in,mlp_out"}


@dataclasses.dataclass(frozen=True)
class Model:
    task: str
    full: dict[str, Any]
    """The task's settings at the published width."""
    narrow: dict[str, Any]
    """What is other at the same depth with fewer channels."""
    shards: bool = False
    """Whether several virtual devices share one copy of the weights: each has a whole one else."""


MODELS = {
    "EIT published": Model(
        "eit", {"size": "published"}, {"width": 64, "heads": 16}
    ),
    "GPT-2 124M": Model(
        "llm", {"model": "12x12x768", "block_size": 64}, {"model": "12x12x48"}
    ),
    "ViT-B/16": Model(
        "images",
        {"model": "vit_base_patch16_224"},
        {"model": "vit_tiny_patch16_224", "image_size": 32},
    ),
    "ResNet-50": Model("images", {"model": "resnet50"}, {"image_size": 64}),
    "Qwen3-0.6B, LoRA": Model(
        "llm", {"model": "Qwen3-0.6B", "block_size": 64, "init": "scratch", **LORA}, {}, True
    ),
}  # fmt: skip


PUBLISHED = {
    "GPT-2 124M, 1024 tokens": "GPT-2 124M",
    "ViT-B/16": "ViT-B/16",
    "ResNet-50": "ResNet-50",
    "Qwen3-0.6B, 1024 tokens, LoRA": "Qwen3-0.6B, LoRA",
}
"""Rows of tpu_batches.json whose host time is measured."""
TENSORS = {
    "ViT-S/16": 152, "BERT base, 512 tokens": 201, "RoBERTa base, 512 tokens": 201,
    "EfficientNet-B0": 213, "Swin-T": 173, "DeiT3-S/16": 176, "MobileNetV4 conv medium": 233,
    "DeBERTa-v3 base, 512 tokens": 202, "DeBERTa-v3 small, 512 tokens": 106,
    "Gemma-3-270M, 1024 tokens": 236, "SmolLM2-360M, 1024 tokens": 290,
    "Qwen3-0.6B, 1024 tokens": 310, "Gemma-3-1B, 1024 tokens": 340,
}  # fmt: skip
"""Number of parameter tensors of others, by which their host time is estimated."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=[*MODELS])
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--width", default="narrow", choices=["full", "narrow"])
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--page", action="store_true", help="write the page from the results")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def task_of(model: Model, width: str) -> Any:
    from tpukit.registry.classes import load_task

    settings = {**model.full, **(model.narrow if width == "narrow" else {})}
    if model.task != "eit" or width == "full":
        return load_task(model.task, settings, "/nonexistent").for_probing()
    from tpukit.tasks.eit.model.lean import lean_network
    from tpukit.tasks.eit.model.network import SIZES

    task = load_task("eit", model.full, "/nonexistent").for_probing()
    task.shape = dataclasses.replace(SIZES["published"], **model.narrow)
    task.build_model = lambda ops: lean_network(task.shape, ops)
    return task


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One model on the devices that the environment gives."""
    import torch_xla.core.xla_model as xm

    from tpukit.hardware.options import HardwareOptions
    from tpukit.hardware.select import open_backend
    from tpukit.train.config import TrainConfig
    from tpukit.train.learner import build_learner, seed_everything
    from tpukit.train.task import PlanSettings

    model, devices = MODELS[name], options.child
    shard = model.shards and devices > 1
    options_of_hardware: dict[str, Any] = {
        "hw": "tpu", "precision": options.precision, "shard": shard, "step_mode": "recorded",
    }  # fmt: skip
    backend: Any = open_backend(HardwareOptions(**options_of_hardware))
    task = task_of(model, options.width)
    seed_everything(0)
    config = TrainConfig(lr=1e-4, ema_decay=0.999, ema_every=10, clip_norm=1.0, weight_decay=0.01)
    learner = build_learner(task, backend, task.build_model(backend), config)
    [host, *_] = task.probe_batches(PlanSettings(devices, devices, devices, 0))
    recorded = backend.recorded

    def step(kind: str) -> float:
        """Milliseconds."""
        backend.recorded = recorded if kind == "recorded" else None
        batch = next(iter(backend.batches([host])))
        xm.wait_device_ops()
        started = time.thread_time()
        learner.train_step([batch], 1e-4)
        took = time.thread_time() - started
        xm.wait_device_ops()
        return 1000 * took

    for kind in ("traced", "traced", *["recorded"] * 4):
        step(kind)
    compiled, executed = backend.compilations(), recorded.executed
    times: dict[str, list[float]] = {"traced": [], "recorded": []}
    for _ in range(options.rounds):
        for kind, count in (("traced", TRACED), ("recorded", RECORDED)):
            step(kind)
            times[kind] += [step(kind) for _ in range(count)]
    parameters = [*backend.unwrap(learner.model).parameters()]
    trained = [p for p in parameters if p.requires_grad]
    medians = {kind: statistics.median(found) for kind, found in times.items()}
    return {
        "model": name,
        "devices": devices,
        "shard": shard,
        "width": options.width if model.narrow else "full",
        "precision": options.precision,
        "tensors": len(parameters),
        "trained_tensors": len(trained),
        "parameters": sum(p.numel() for p in parameters),
        "traced_ms": round(medians["traced"], 2),
        "recorded_ms": round(medians["recorded"], 2),
        "ratio": round(medians["traced"] / medians["recorded"], 2),
        "least_ms": {kind: round(min(found), 2) for kind, found in times.items()},
        "recorded_steps": recorded.executed - executed,
        "steps": {kind: len(found) for kind, found in times.items()},
        "compilations": backend.compilations() - compiled,
        "parts": [len(p.parts) for each in recorded._known.values() for p in each.values() if p],
        "load": round(os.getloadavg()[0], 1),
    }


def ask(name: str, devices: int, options: argparse.Namespace) -> dict[str, Any]:
    """`measure` in a process with so many virtual devices."""
    command = [sys.executable, __file__, name, "--child", str(devices), "--width", options.width,
               "--precision", options.precision, "--rounds", str(options.rounds)]  # fmt: skip
    environment = {**os.environ, **QUICK, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(devices)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"model": name, "devices": devices, "error": done.stderr.strip().splitlines()[-1]}
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def table(titles: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def page() -> str:
    """docs/lab/host_time.md."""
    rows = json.loads(RESULT.read_text())["rows"]
    alone = {row["model"]: row for row in rows if row["devices"] == 1}
    per_tensor = [
        statistics.median(row[kind] / row["trained_tensors"] for row in alone.values())
        for kind in ("traced_ms", "recorded_ms")
    ]
    measured = [
        [row["model"], row["devices"], row["trained_tensors"], f"{row['traced_ms']:.0f}",
         f"{row['recorded_ms']:.0f}", f"{row['ratio']:.1f}"]
        for row in rows
    ]  # fmt: skip
    return PAGE_TEXT.format(
        measured=table(["model", "devices", "trained tensors", "traced, ms", "recorded, ms",
                        "ratio"], measured),
        bounds=table(["model", "one sample on a v5e chip, ms", "traced, ms", "recorded, ms",
                      "host-bound below, traced", "recorded"], bounds(alone, per_tensor)),
        versions=", ".join(f"{name} {v}" for name, v in rows[-1]["versions"].items()),
        load=f"{min(row['load'] for row in rows):.0f} to {max(row['load'] for row in rows):.0f}",
        commits=", ".join(sorted({row["commit"] for row in rows})),
    )  # fmt: skip


def bounds(alone: Mapping[str, Any], per_tensor: Sequence[float]) -> Iterator[list[Any]]:
    """By model of tpu_batches.json the samples a chip below which the host decides."""
    for key, row in json.loads(RESULT.with_name("tpu_batches.json").read_text()).items():
        name, _, target = key.partition(" | ")
        known = alone.get(PUBLISHED.get(name, ""))
        if target != "v5e-1" or "step" not in row or not (known or name in TENSORS):
            continue
        sample = 1000 * row["step"]["estimate_seconds"] / row["recommended"]
        host = [each * TENSORS.get(name, 0) for each in per_tensor]
        if known:
            host = [known["traced_ms"], known["recorded_ms"]]
        sign = "" if known else "about "
        yield [name, f"{sample:.2f}", *(f"{sign}{ms:.0f}" for ms in host),
               *(math.ceil(ms / sample) for ms in host)]  # fmt: skip


PAGE_TEXT = """# What a step costs the host

On torch_xla a training step is Python that traces every operation, in each step anew: the chips
wait for it where the batch is small. tpukit traces the first two steps of a shape and records
them; from the third on the compiled program runs with the inputs' buffers, and no Python of the
step runs. The results are the same, bit for bit.

`--steps auto`, the default, tries recorded steps beside traced ones in a child process, once for a
kind of TPU, and traces each step where they differ. `--steps traced` traces each step. Several
hosts of a pod, and emulation with `--memory-limit`, trace each step too.

A step is recorded again where something that its Python reads has changed: attributes, closures,
globals, hooks, frozen layers, arrays on the host, how a tensor is split over the devices. A step
that cannot be recorded is always traced, which costs one more compilation in some cases, and a
line names the reason and, where there is one, the place: it reads a value (`.item()`), draws from a
generator of the host, counts in Python (`self.calls += 1`), keeps a result for later, or its
optimizer reads the learning rate.

Whether a run waits for the host the progress line says: `host-bound 93%` is the part of the time
in which the thread that trains computes, where that is at least 80 %. A larger batch a chip
helps, up to where the memory ends (`tpukit probe-batch`); `--accumulate` does not: each
micro-batch is traced, or run, by itself.

## Measured

Processor time of the thread that trains, a step, traced and recorded in turn in one process, on
virtual devices of the CPU; what executes on other threads is left out. The models have the depth
of the published ones and fewer channels (Qwen3 its own): the number of tensors and operators
decides.

{measured}

The machine had two cores and was busy (load {load}): on a quiet one both columns are smaller.

## Which models gain

A chip's time is the TPU compiler's estimate at the batch that [tpu_batches.md](tpu_batches.md)
recommends, divided by the samples; the host's is that of one device, for models that were not
measured by their number of tensors ("about"). Below the batch a chip in the last columns the host
takes longer than the chip.

{bounds}

`benchmarks/host_time.py`, [host_time.json](../../benchmarks/results/host_time.json), commit
{commits}; {versions}. No TPU was used.
"""


def main() -> None:
    options = parse()
    if options.page:
        PAGE.write_text(page(), encoding="utf-8")
        return
    if options.child:
        print(json.dumps(measure(options.models[0], options)))
        return
    kept = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else []
    rows = {(row["model"], row["devices"], row.get("width")): row for row in kept}
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    packages = ("torch", "torch_xla", "timm", "transformers", "numpy")
    versions = {"python": platform.python_version(), **{name: version(name) for name in packages}}
    for devices in options.devices:
        for name in options.models:
            row = ask(name, devices, options)
            print(json.dumps(row), flush=True)
            if "error" in row:
                continue
            measured = {"commit": commit, "date": time.strftime("%Y-%m-%d"), "versions": versions}
            rows[name, devices, row["width"]] = {**row, **measured}
            write_result(RESULT, {
                "question": "processor milliseconds of the thread that trains, a step",
                "rows": [*rows.values()],
            })  # fmt: skip


if __name__ == "__main__":
    main()
