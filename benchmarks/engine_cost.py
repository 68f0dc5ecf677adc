"""What the engine adds to a step: the same steps through the engine and as a bare loop.

    python benchmarks/engine_cost.py [--hw cpu|tpu] [--size tiny] [--blocks 6] [--steps 25]

One process, one machine: after each block of the engine's steps, as many bare ones of a second
copy of the network (EIT), with the same batches, optimizer, clipping and EMA. The engine's
side is the whole of it: DataLoader workers, moving batches, metrics read every ten steps, logs. The
bare side holds images and voltages ready in memory and draws its noise, as any loop of this step
must. Loading is measured on 100,000 samples.
"""

import argparse
import atexit
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from recorded import RESULTS, write_result

WARM_UP = 4
"""Steps before the first block."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hw", default="cpu", choices=["cpu", "tpu"])
    parser.add_argument("--steps", type=int, default=25, help="a block")
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--size", default="tiny")
    return parser.parse_args()


def made_up_task(size: str, samples: int):
    """The EIT task on packed, memory-mapped samples, as its own cache of a data folder has them."""
    import numpy as np

    from tpukit.tasks.eit.data.dataset import EITDataset, Normalisation
    from tpukit.tasks.eit.data.samples import Samples
    from tpukit.tasks.eit.task import EITTask
    from tpukit.train.task import Datasets

    folder = Path(tempfile.mkdtemp(prefix="engine-cost-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    rng = np.random.default_rng(0)
    some = {
        "ys": rng.standard_normal((500, 208), dtype=np.float32),
        "xs": rng.integers(-1, 2, (500, 128, 128)).astype(np.float16),
    }
    arrays = {}
    for name, part in some.items():
        shape = (samples, *part.shape[1:])
        array = np.lib.format.open_memmap(folder / f"{name}.npy", "w+", part.dtype, shape)
        for start in range(0, samples, len(part)):
            array[start : start + len(part)] = part[: samples - start]
        arrays[name] = array
    unit = Normalisation(np.zeros(208, np.float32), np.ones(208, np.float32))
    data = EITDataset(Samples(**arrays), unit)
    task = EITTask(size=size)
    task.datasets = lambda: Datasets(data, None)
    return task


class Blocks:
    """Seconds of the engine's blocks and of the bare ones between them.

    It stands in for the task's loss: called as the first thing of every step, it knows where a
    block of the engine's ends, and runs a bare one before it goes on.
    """

    def __init__(self, task, config, backend, options) -> None:
        self.steps, self.wait = options.steps, waiting(backend)
        self.task_loss = task.loss
        self.run_bare = bare_block(task, config, backend, options.steps)
        self.calls, self.resumed = 0, 0.0
        self.engine: list[float] = []
        self.bare: list[float] = []

    def loss(self, model, batch):
        # The first steps, which compile and start the loading processes, are left out.
        done = self.calls - WARM_UP
        self.calls += 1
        if done >= 0 and done % self.steps == 0:
            self.wait()
            now = time.monotonic()
            if done:
                self.engine.append(now - self.resumed)
            self.bare.append(self.run_bare())
            self.resumed = time.monotonic()
        return self.task_loss(model, batch)


def waiting(backend):
    """Returns when the device has done what was asked."""
    if not backend.compiles_everything:
        return lambda: None
    from torch_xla.core import xla_model

    return xla_model.wait_device_ops


def bare_block(task, config, backend, steps: int):
    """A function that runs `steps` steps with nothing around them and returns their seconds."""
    import torch

    from tpukit.train.loader import LoaderSettings, PlannedMicroBatches, make_loader
    from tpukit.train.run_state import load_learner
    from tpukit.train.task import PlanSettings

    data = task.datasets().train
    size = config.global_batch_size
    sampler = PlannedMicroBatches(task.plan(data, PlanSettings(size, size, 1, 0)), range(4), 0, 1)
    loader = make_loader(task, data, sampler, LoaderSettings(workers=0, seed=0))
    batches = list(backend.batches(loader))
    learner = load_learner(copy_of(task), config, backend)
    step, wait = bare_step(learner, config, backend), waiting(backend)
    for batch in batches[:WARM_UP]:
        step(batch)

    def block() -> float:
        wait()
        started = time.monotonic()
        for index in range(steps):
            batch = batches[index % len(batches)]
            step({**batch, "noise": torch.randn(batch["noise"].shape).to(backend.device)})
        wait()
        return time.monotonic() - started

    return block


def copy_of(task):
    """The task with its own loss: the other's counts the engine's steps."""
    import copy

    other = copy.copy(task)
    other.loss = type(task).loss.__get__(other)
    return other


def bare_step(learner, config, backend):
    """Forward, backward, clip, AdamW, EMA: as anyone would write them on this hardware."""
    import torch

    task, model, optimizer = learner.task, learner.model, learner.optimizer
    parameters = [p for p in model.parameters() if p.requires_grad]
    averages = list(learner.ema.weights.values())

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
            numbers = optimizer.numbers(optimizer.used(), config.lr)
            optimizer.apply(backend.mesh.send(numbers), factor)
            for average, parameter in zip(averages, parameters, strict=True):
                average.lerp_(parameter, 1 - config.ema_decay)
        torch_xla.sync()

    return traced if backend.compiles_everything else eager


def loading_rate(task, config, seconds: float = 6.0) -> float:
    """Samples a second that one loading process makes, with nobody waiting for it."""
    from tpukit.train.loader import LoaderSettings, PlannedMicroBatches, make_loader
    from tpukit.train.task import PlanSettings

    data = task.datasets().train
    size = config.global_batch_size
    plan = task.plan(data, PlanSettings(size, size, 1, 0))
    loader = make_loader(
        task, data, PlannedMicroBatches(plan, range(10**9), 0, 1), LoaderSettings(workers=1, seed=0)
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
    from tpukit.hardware.options import HardwareOptions
    from tpukit.hardware.select import open_backend
    from tpukit.train.config import TrainConfig
    from tpukit.train.plan import TrainingRequest
    from tpukit.train.run import train_run
    from tpukit.train.run_folder import RunFolder

    backend = open_backend(HardwareOptions(hw=options.hw, precision="fp32"))
    config = TrainConfig(
        global_batch_size=options.batch, max_steps=WARM_UP + options.blocks * options.steps + 1,
        log_every=10, ckpt_every=10**6, accumulate=1, ema_decay=0.99, lr=1e-4,
    )  # fmt: skip
    task = made_up_task(options.size, options.samples)
    blocks = Blocks(task, config, backend, options)
    task.loss = blocks.loss
    with tempfile.TemporaryDirectory() as folder:
        request = TrainingRequest(task, config, RunFolder(Path(folder) / "run"))
        train_run(request, backend, lambda line: None)
    rates = {
        side: [options.steps * options.batch / seconds for seconds in found]
        for side, found in (("engine", blocks.engine), ("bare", blocks.bare))
    }
    # Each block of the engine's beside the mean of the bare ones before and after it.
    ratios = [
        seconds / ((before + after) / 2)
        for seconds, before, after in zip(blocks.engine, blocks.bare, blocks.bare[1:], strict=False)
    ]
    body = {
        "question": "time of a step through the engine over a bare loop's",
        "hardware": dict(backend.describe()),
        "size": options.size,
        "batch": options.batch,
        "steps": options.steps,
        "samples": options.samples,
        "engine_samples_per_second": rates["engine"],
        "bare_samples_per_second": rates["bare"],
        "ratio_median": statistics.median(ratios),
        "ratio_of_fastest": min(blocks.engine) / min(blocks.bare),
        "ratios": ratios,
        "loading_samples_per_second_one_process": loading_rate(task, config),
    }
    path = RESULTS / f"engine_cost_{options.hw}_{options.size}.json"
    write_result(path, body)
    for name in ("ratio_median", "ratio_of_fastest", "loading_samples_per_second_one_process"):
        print(f"{name} {body[name]:.4f}")
    print(path)


if __name__ == "__main__":
    main()
