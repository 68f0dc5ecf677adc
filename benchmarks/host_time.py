"""What a training step on torch_xla costs the host: traced and recorded, in turn, in one process.

    python benchmarks/host_time.py [MODEL ...] [--devices 1 8] [--width full|narrow] [--rounds 4]

Processor time of the thread that trains, from the call of `train_step` to its return, on virtual
devices of the CPU; what other threads execute is left out, and nothing runs while it is measured.
The models have the depth of the published ones, and with `--width narrow` fewer channels: the
number of tensors and operators decides the time, not their size. Weights are random, batches
synthetic. Writes results/host_time.json, and prints beside it from which batch a chip decides, by
results/tpu_batches.json.
"""

import argparse
import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from recorded import RESULTS, measured, table, write_result

RESULT, BATCHES = RESULTS / "host_time.json", RESULTS / "tpu_batches.json"
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
        "eit", {"size": "published"}, {"width": 64, "heads": 16, "image_side": 64}
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
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def task_of(model: Model, width: str) -> Any:
    from tpukit.registry.classes import load_task
    from tpukit.train.task import for_probing

    narrow = model.narrow if width == "narrow" else {}
    if model.task != "eit":
        return for_probing(load_task(model.task, {**model.full, **narrow}, "/nonexistent"))
    from tpukit.tasks.eit.model.network import SIZES

    SIZES["published"] = dataclasses.replace(SIZES["published"], **narrow)
    return for_probing(load_task("eit", model.full, "/nonexistent"))


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


def bounds(alone: Mapping[str, Any], per_tensor: Sequence[float]) -> Iterator[dict[str, Any]]:
    """By model of tpu_batches.json the samples a chip below which the host decides."""
    for key, row in json.loads(BATCHES.read_text())["rows"].items():
        name, _, target = key.partition(" | ")
        known = alone.get(PUBLISHED.get(name, ""))
        if target != "v5e-1" or "step" not in row or not (known or name in TENSORS):
            continue
        sample = 1000 * row["step"]["estimate_seconds"] / row["recommended"]
        host = [each * TENSORS.get(name, 0) for each in per_tensor]
        if known:
            host = [known["traced_ms"], known["recorded_ms"]]
        sign = "" if known else "about "
        traced, recorded = host
        yield {
            "model": name,
            "one sample on a v5e chip, ms": f"{sample:.2f}",
            "traced, ms": f"{sign}{traced:.0f}",
            "recorded, ms": f"{sign}{recorded:.0f}",
            "host-bound below, traced": math.ceil(traced / sample),
            "host-bound below, recorded": math.ceil(recorded / sample),
        }


def print_tables(rows: Sequence[Mapping[str, Any]]) -> None:
    """What docs/lab/host_time.md shows."""
    names = ("model", "devices", "trained_tensors", "traced_ms", "recorded_ms", "ratio")
    print(table([{name: row[name] for name in names} for row in rows]))
    alone = {row["model"]: row for row in rows if row["devices"] == 1}
    if alone:
        per_tensor = [
            statistics.median(row[kind] / row["trained_tensors"] for row in alone.values())
            for kind in ("traced_ms", "recorded_ms")
        ]
        print(table([*bounds(alone, per_tensor)]))


def main() -> None:
    options = parse()
    if options.child:
        print(json.dumps(measure(options.models[0], options)))
        return
    kept = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else []
    rows = {(row["model"], row["devices"], row.get("width")): row for row in kept}
    for devices in options.devices:
        for name in options.models:
            row = ask(name, devices, options)
            if "error" in row:
                print(json.dumps(row), flush=True)
                continue
            rows[name, devices, row["width"]] = {**row, **measured()}
            write_result(RESULT, {
                "question": "processor milliseconds of the thread that trains, a step",
                "rows": [*rows.values()],
            })  # fmt: skip
    print_tables([*rows.values()])


if __name__ == "__main__":
    main()
