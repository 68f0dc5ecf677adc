"""What the engine adds to a step: the same training through the engine and as a bare loop.

    python benchmarks/engine_cost.py [--hw cpu|tpu] [--steps 30] [--rounds 5]

Both sides run in turn in one process: the same network (EIT), batches, optimizer, clipping and
average. The engine's side is the whole of it: loading processes, moving batches, figures read
every ten steps, logs. The bare side holds its batches ready in memory. Loading is measured on
100,000 samples by their number alone (the samples are links to a few files).
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hw", default="cpu", choices=["cpu", "tpu"])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--size", default="tiny")
    return parser.parse_args()


def made_up_task(size: str, samples: int):
    """The EIT task on arrays in memory-mapped form, as its cache would be."""
    import numpy as np

    from tpukit.tasks.eit.task import EITTask
    from tpukit.train.task import Datasets

    task = EITTask(size=size)
    example = task.example_batches(1)[0]
    folder = tempfile.mkdtemp(prefix="engine-cost-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    shapes = {name: tuple(example[name].shape[1:]) for name in ("voltages", "image")}
    arrays = {}
    for name, shape in shapes.items():
        path = Path(folder) / f"{name}.npy"
        array = np.lib.format.open_memmap(path, "w+", np.float32, (samples, *shape))
        # The file stays sparse but for a part: its pages are read all the same.
        array[: min(samples, 2000)] = np.random.default_rng(0).standard_normal(
            (min(samples, 2000), *shape), dtype=np.float32
        )
        arrays[name] = array

    class Memory:
        def __len__(self) -> int:
            return samples

        def __getitem__(self, index: int):
            return {name: array[index] for name, array in arrays.items()}

    task.datasets = lambda: Datasets(Memory(), None)
    task.artifacts = dict
    return task


def engine_round(task, config, backend, folder: Path) -> float:
    """Samples a second of `config.max_steps` steps through the engine, the first left out."""
    from tpukit.train.run import RunRequest, train
    from tpukit.train.run_folder import RunFolder

    request = RunRequest(task, {}, config, RunFolder(folder), "benchmark")
    return train(request, backend, lambda line: None).samples_per_second


def bare_round(task, config, backend) -> float:
    """Samples a second of the same steps with nothing around them, the first left out."""
    from tpukit.train.loader import LoaderSettings, PlannedMicroBatches, make_loader
    from tpukit.train.restore import load_learner
    from tpukit.train.task import PlanSettings

    data = task.datasets().train
    plan = task.plan(
        data,
        PlanSettings(config.global_batch_size, config.global_batch_size, backend.devices, 0),
    )
    sampler = PlannedMicroBatches(plan, 0, 4, 0, 1)
    loader = make_loader(task, data, sampler, LoaderSettings(workers=0, seed=0))
    batches = list(backend.batches(loader))
    learner = load_learner(task, config, backend, None)
    step = bare_step(learner, config, backend)
    step(batches[0])
    started = time.monotonic()
    for index in range(1, config.max_steps):
        step(batches[index % len(batches)])
    wait(learner)
    seconds = time.monotonic() - started
    return (config.max_steps - 1) * config.global_batch_size / seconds


def bare_step(learner, config, backend):
    """Forward, backward, clip, AdamW, average: as anyone would write them on this hardware."""
    import torch

    task, model, optimizer = learner.task, learner.model, learner.optimizer
    parameters = [p for p in model.parameters() if p.requires_grad]
    averages = list(learner.average.averages.values())

    def eager(batch) -> None:
        optimizer.zero_grad()
        task.loss(model, batch)["loss"].mean().backward()
        torch.nn.utils.clip_grad_norm_(parameters, config.clip_norm)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(averages, [p.detach() for p in parameters], 1 - config.ema_decay)

    def traced(batch) -> None:
        import torch_xla

        for parameter in parameters:
            parameter.grad = None
        task.loss(model, batch)["loss"].mean().backward()
        with torch.no_grad():
            norm = torch.stack([p.grad.square().sum() for p in parameters]).sum().sqrt()
            factor = (config.clip_norm / (norm + 1e-6)).clamp(max=1.0)
            optimizer.apply(backend.mesh.send(optimizer.numbers(config.lr)), factor)
            for average, parameter in zip(averages, parameters, strict=True):
                average.lerp_(parameter, 1 - config.ema_decay)
        torch_xla.sync()

    return traced if backend.traced else eager


def wait(learner) -> None:
    """Until the device has done what was asked: a value is read."""
    next(iter(learner.model.parameters())).detach().flatten()[:1].cpu()


def loading_rate(task, config, seconds: float = 6.0) -> float:
    """Samples a second that one loading process makes, with nobody waiting for it."""
    from tpukit.train.loader import LoaderSettings, PlannedMicroBatches, make_loader
    from tpukit.train.task import PlanSettings

    data = task.datasets().train
    size = config.global_batch_size
    plan = task.plan(data, PlanSettings(size, size, 1, 0))
    loader = make_loader(
        task, data, PlannedMicroBatches(plan, 0, 10**9, 0, 1), LoaderSettings(workers=1, seed=0)
    )
    batches = iter(loader)
    next(batches)
    started, count = time.monotonic(), 0
    while time.monotonic() - started < seconds:
        next(batches)
        count += size
    return count / (time.monotonic() - started)


def main() -> None:
    options = parse()
    if options.hw == "tpu":
        os.environ.setdefault("PJRT_DEVICE", "CPU")
        os.environ.setdefault("CPU_NUM_DEVICES", "1")
    from tpukit.hardware.choice import open_backend
    from tpukit.hardware.options import HardwareOptions
    from tpukit.train.config import TrainConfig
    from tpukit.train.run_folder import versions

    backend = open_backend(HardwareOptions(hw=options.hw, precision="fp32"))
    config = TrainConfig(
        global_batch_size=options.batch, max_steps=options.steps, log_every=10, ckpt_every=10**6,
        accumulate=1, ema_decay=0.99, lr=1e-4, num_workers=1,
    )  # fmt: skip
    task = made_up_task(options.size, options.samples)
    pairs = []
    for index in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            engine = engine_round(task, config, backend, Path(folder) / "run")
        bare = bare_round(task, config, backend)
        pairs.append((engine, bare))
        print(f"round {index + 1}: engine {engine:.2f}, bare {bare:.2f} samples/s")
    ratios = [bare / engine for engine, bare in pairs]
    body = {
        "question": "time of a step through the engine over a bare loop's",
        "hardware": dict(backend.describe()),
        "size": options.size,
        "batch": options.batch,
        "steps": options.steps,
        "samples": options.samples,
        "engine_samples_per_second": [engine for engine, _ in pairs],
        "bare_samples_per_second": [bare for _, bare in pairs],
        "ratio_median": statistics.median(ratios),
        "ratios": ratios,
        "loading_samples_per_second_one_process": loading_rate(task, config),
        "versions": versions(),
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"engine_cost_{options.hw}.json"
    path.write_text(json.dumps(body, indent=1) + "\n")
    print(f"median ratio {body['ratio_median']:.4f}; {path}")


if __name__ == "__main__":
    main()
