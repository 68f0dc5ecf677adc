"""Training on summaries on eight chips: rows that hold several samples, beside buckets.

    python benchmarks/summarize_packing.py [--target v5e-8] --out FILE.json

GPT-2 124M in bf16, lengths like SAMSum's. The plans of both are laid out for some steps; the TPU
compiler compiles the micro-batch of each of their shapes for one chip, at the fast setting. A
micro-batch takes as long as the slower of its arithmetic and its bytes at the chip's peak rates (a
roofline); a step takes the sum of its micro-batches. The optimizer's update, once a step in both,
is left out. What FILE.json has of the same versions
and code is not compiled again. Nothing runs on a TPU.
"""

import argparse
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from deciding_code import code_of, write_result
from step_traffic import ENVIRONMENT
from summarize_training import make_samples

CONTEXT = 1024
STEPS = 20
BATCHES = ((256, 256), (256, 64))
"""Global batch sizes, and samples of a micro-batch over all chips."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="v5e-8")
    parser.add_argument("--buckets", type=int, default=8)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def plans(devices: int, buckets: int, batch: int, micro_rows: int) -> tuple[Any, dict[str, Any]]:
    """The samples, and the plan of each way."""
    from tpukit.tasks.summarize.data.buckets import BucketPlan
    from tpukit.tasks.summarize.data.packing import PackedPlan, packed_shape
    from tpukit.tasks.summarize.data.prompt import Example
    from tpukit.tasks.summarize.evaluate import ListedSamples
    from tpukit.train.task import PlanSettings

    data = ListedSamples([Example(list(t), n) for t, n in make_samples()], buckets)
    settings = PlanSettings(batch, micro_rows, devices, 0, compiles=True)
    shapes = data.bucketing.buckets(micro_rows // devices)
    packed = packed_shape(data.bucketing, settings)
    return data, {
        "buckets": BucketPlan(data.sizes, shapes, settings),
        "packed": PackedPlan(data.sizes, packed, settings),
    }


def compiled(shape: Any, packed: bool, target: Any) -> dict[str, Any]:
    """One chip's micro-batch: what the compiler says of it, and how long it compiled."""
    from tpukit.probe.compiler.compile import TpuCompiler
    from tpukit.probe.compiler.hlo import costs_of
    from tpukit.probe.compiler.trace import open_tracing, trace_step
    from tpukit.probe.targets import find_target
    from tpukit.tasks.summarize.data.dataset import example_batch
    from tpukit.tasks.summarize.task import SummarizeTask
    from tpukit.train.config import TrainConfig

    class OneShape(SummarizeTask):
        def probe_batches(self, settings: Any) -> list[Any]:
            return [example_batch(shape, 1, 50257, packed=2 if packed else None)]

    task = OneShape(init="scratch", data_path="none").for_probing()
    backend = open_tracing("bf16", shard=False, fused=True)
    config = TrainConfig(lr=1e-4, precision="bf16")
    program = trace_step(task, config, backend, shape.rows, 2).training[0]
    one = find_target(target.name.split("-")[0] + "-1")
    started = time.monotonic()
    executable = TpuCompiler(one.topology, one.devices).compile(program, "fast")
    found = costs_of(executable, program.kernel_share)
    chip = target.generation
    by_arithmetic = found.flops / chip.flops_per_second
    by_memory = found.bytes_accessed / chip.bytes_per_second
    return {
        "flops": found.flops,
        "bytes": found.bytes_accessed,
        "memory_bytes": found.total,
        "seconds": max(by_arithmetic, by_memory),
        "compile_seconds": round(time.monotonic() - started, 1),
    }


def measured(plan: Any, data: Any, target: Any, known: dict[str, Any]) -> dict[str, Any]:
    """Real tokens to bytes, operations and seconds over some steps of a plan."""
    micro_batches = [micro for step in range(STEPS) for micro in plan.step(step)]
    counts = Counter(micro.shape for micro in micro_batches)
    for shape in counts:
        if repr(shape) not in known:
            known[repr(shape)] = compiled(shape, micro_batches[0].counts is not None, target)
            print(shape, known[repr(shape)], flush=True)
    tokens = sum(int(data.sizes.lengths[k.sample]) for m in micro_batches for k in m.keys)
    devices = target.devices
    places = sum(m.rows * m.shape.length for m in micro_batches)
    total = {
        name: sum(known[repr(shape)][name] * count for shape, count in counts.items())
        for name in ("flops", "bytes", "seconds")
    }
    return {
        "real_tokens_to_places": tokens / places,
        "micro_batches_a_step": len(micro_batches) / STEPS,
        "shapes": {repr(shape): known[repr(shape)] for shape in counts},
        "programs": len(counts),
        "compile_seconds": sum(known[repr(shape)]["compile_seconds"] for shape in counts),
        "real_tokens_a_gigaflop": tokens / devices / total["flops"] * 1e9,
        "real_tokens_a_megabyte": tokens / devices / total["bytes"] * 1e6,
        "real_tokens_a_second": tokens / total["seconds"],
    }


def earlier(path: Path, versions: dict[str, str]) -> dict[str, Any]:
    """The shapes in a file of the same versions and code."""
    kept = json.loads(path.read_text()) if path.exists() else {}
    if kept.get("versions") != versions or kept.get("code") != code_of(path.stem):
        return {}
    ways = [case[way] for case in kept["cases"] for way in ("buckets", "packed")]
    return {shape: found for way in ways for shape, found in way["shapes"].items()}


def main() -> None:
    options = parse()
    if any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ENVIRONMENT})
    from tpukit.knowledge.versions import installed_versions
    from tpukit.probe.compiler.client import PARTS
    from tpukit.probe.targets import find_target

    target, cases = find_target(options.target), []
    known = earlier(options.out, installed_versions(PARTS))
    for batch, micro_rows in BATCHES:
        data, ways = plans(target.devices, options.buckets, batch, micro_rows)
        found = {name: measured(plan, data, target, known) for name, plan in ways.items()}
        ratios = {
            name: found["packed"][name] / found["buckets"][name]
            for name in ("real_tokens_a_gigaflop", "real_tokens_a_megabyte", "real_tokens_a_second")
        }
        cases.append({"global_batch": batch, "micro_batch": micro_rows, "ratios": ratios, **found})
        print(json.dumps({name: round(ratio, 2) for name, ratio in ratios.items()}), flush=True)
        body = {
            "question": "real tokens to operations, bytes and seconds: packed rows beside buckets",
            "target": options.target,
            "buckets": options.buckets,
            "cases": cases,
            "versions": installed_versions(PARTS),
        }
        write_result(options.out, body)


if __name__ == "__main__":
    main()
