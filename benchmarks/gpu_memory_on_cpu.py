"""Predicted against measured peaks of live tensors of a real step on this CPU, by models.

    python benchmarks/gpu_memory_on_cpu.py [--rows 8]

Predicted: the trace over fake tensors behind `probe-batch --target t4`, with operators in the CPU's
forms. Measured: the CPU backend's own step in fp32 under torch's profiler, which records each
allocation and release. Both count the resident tensors and the fullest moment of one step, without
what a CPU's convolution allocates while it runs (24 MiB in edgenext_small): a GPU's is another.
"""

import argparse
import bisect
import contextlib
import functools
import itertools
import multiprocessing
import os
import queue
import statistics
import time
from collections.abc import Iterable, Sequence
from typing import Any

from recorded import RESULTS, write_result

RESULT = RESULTS / "gpu_memory_on_cpu.json"
SECONDS_A_MODEL = 240
CONVOLUTIONS = ("aten::convolution_backward", "aten::_convolution")
MODELS = (
    "resnet18",
    "mobilenet_v2",
    "resnet50",
    "mobilenet_v3_large",
    "squeezenet1_0",
    "mnasnet1_0",
    "shufflenet_v2_x1_0",
    "regnet_y_400mf",
    "efficientnet_b0",
    "swin_t",
    "convnext_tiny",
    "densenet121",
    "resnet34",
    "resnext50_32x4d",
    "alexnet",
    "ghostnet_100",
    "dla34",
    "repvgg_a2",
    "poolformer_s12",
    "edgenext_small",
    "mobilevit_s",
    "hrnet_w18_small",
    "res2net50_26w_4s",
    "efficientnetv2_rw_t",
    "convmixer_768_32",
    "resnetrs50",
    "seresnet50",
    "ecaresnet26t",
    "regnetx_002",
    "darknet53",
    "cspresnet50",
    "vovnet39a",
    "fbnetc_100",
    "mixnet_s",
    "tinynet_a",
    "lcnet_100",
    "mobilenetv4_conv_small",
    "fasternet_t0",
    "rexnet_100",
    "hardcorenas_a",
)


def live_peak(trace: Any) -> int:
    """Bytes of the fullest moment of the traced step, without batches that wait."""
    total = most = 0
    for place, event in enumerate(trace.events[: trace.marks["evaluate"]]):
        size = trace.storages[max(event, ~event)].size_bytes
        total += size if event >= 0 else -size
        if place >= trace.marks["step"]:
            most = max(most, total)
    return most


def measured(task: Any, config: Any, rows: int) -> tuple[int, int]:
    """Resident bytes of the learner and what the profiler saw on top of them: all of it, and
    without what convolutions take while they run."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from tpukit.hardware.options import HardwareOptions
    from tpukit.hardware.select import open_backend
    from tpukit.train.run_state import load_learner
    from tpukit.train.task import PlanSettings

    backend = open_backend(HardwareOptions(hw="cpu"))
    learner = load_learner(task, config, backend)
    batch = task.probe_batches(PlanSettings(rows, rows, 1, 0))[0]
    learner.train_step([batch], lr=1e-4)
    state = [v for s in learner.optimizer.state.values() for v in s.values()]
    model = learner.model
    kept = [*model.parameters(), *model.buffers(), *state, *batch.values(), learner.window,
            learner._step_totals, learner._norms,
            *(learner.ema.weights.values() if learner.ema else ())]  # fmt: skip
    held = {t.untyped_storage()._cdata: t.untyped_storage().nbytes()
            for t in kept if isinstance(t, torch.Tensor)}  # fmt: skip
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        learner.train_step([batch], lr=1e-4)
    events = profiler.profiler.kineto_results.events()
    spans = sorted(
        (e.start_ns(), e.start_ns() + e.duration_ns()) for e in events if e.name() in CONVOLUTIONS
    )
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    resident = sum(held.values())
    return resident + fullest(changes), resident + fullest(_at_ends(changes, spans))


def fullest(changes: Iterable[tuple[int, int]]) -> int:
    """The most bytes alive after any of these changes."""
    return max(itertools.accumulate((change for _, change in changes), initial=0))


def _at_ends(
    changes: Iterable[tuple[int, int]], spans: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """The changes, those within a convolution's kernel all at its end: its workspace is gone."""
    starts = [start for start, _ in spans]
    moved = []
    for moment, change in changes:
        place = bisect.bisect_right(starts, moment) - 1
        inside = place >= 0 and moment <= spans[place][1]
        moved.append((spans[place][1] if inside else moment, change))
    return [(moment, sum(c for _, c in group)) for moment, group in
            itertools.groupby(sorted(moved), key=lambda pair: pair[0])]  # fmt: skip


def build(name: str) -> Any:
    """torchvision's or timm's model of this name."""
    import timm
    import torchvision

    if name in torchvision.models.list_models():
        return torchvision.models.get_model(name)
    return timm.create_model(name)


def compare(name: str, rows: int, results: Any) -> None:
    """The row of one model."""
    import torch

    from tpukit.hardware.prefetch import BATCHES_AHEAD
    from tpukit.probe.batch.model_task import ModelTask
    from tpukit.probe.gpu_memory.traced_step import trace_fake_step
    from tpukit.probe.targets import find_gpu
    from tpukit.train.config import TrainConfig
    from tpukit.train.task import PlanSettings

    torch.set_num_threads(2)
    config = TrainConfig(precision="fp32")
    task = ModelTask(functools.partial(build, name), ["x=3x64x64"], {})
    started = time.monotonic()
    step = trace_fake_step(task, config, find_gpu("t4"), rows, 1, as_cuda=False)
    seconds = time.monotonic() - started
    [batch] = task.probe_batches(PlanSettings(rows, rows, 1, 0))
    waiting = BATCHES_AHEAD * sum(t.nbytes for t in batch.values())
    predicted = live_peak(step) - waiting
    allocated, real = measured(task, config, rows)
    results.put({"model": name, "rows": rows, "parameters": step.parameters,
                 "predicted_bytes": predicted, "measured_bytes": real,
                 "with_workspaces_bytes": allocated, "error": predicted / real - 1,
                 "trace_seconds": seconds})  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=8)
    options = parser.parse_args()
    os.environ.update(USE_TORCH_XLA="0", PJRT_DEVICE="CPU")
    import timm  # noqa: F401
    import torchvision  # noqa: F401

    import tpukit.probe.gpu_memory.traced_step  # noqa: F401

    rows: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    start = multiprocessing.get_context("fork")
    for name in MODELS:
        results = start.Queue()
        process = start.Process(target=compare, args=(name, options.rows, results))
        process.start()
        with contextlib.suppress(queue.Empty):
            rows.append(results.get(timeout=SECONDS_A_MODEL))
            print(f"{name:40} {rows[-1]['error']:+.2%}", flush=True)
        process.kill()
        process.join()
        if not rows or rows[-1]["model"] != name:
            failed[name] = f"exit code {process.exitcode}"
            print(name, failed[name], flush=True)
        errors = sorted(abs(row["error"]) for row in rows) or [0.0]
        found = {
            "median_error": statistics.median(errors), "largest_error": errors[-1],
            "models": rows, "failed": failed,
        }  # fmt: skip
        write_result(RESULT, found)
    print(f"median {found['median_error']:.2%}, largest {found['largest_error']:.2%}")


if __name__ == "__main__":
    main()
