"""A training step on torch_tpu, eager and with torch.compile: programs launched, time.

    python benchmarks/torch_tpu_compile.py

In the environment of scripts/try_torch_tpu.sh, over the CPU plugin of the tests: the programs
are those that a TPU would run, their time is the CPU's and says nothing of a TPU. One process;
blocks of eager and compiled steps in turn, with the same batch, fp32.
"""

import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from deciding_code import write_result

RESULTS = Path(__file__).parent / "results"
PLUGIN = Path(__file__).parent.parent / "tests" / "support" / "torch_tpu_on_cpu"
WARM_STEPS, STEPS, BLOCKS = 3, 3, 3
ROWS = 4


def tasks():
    """Each network by its name."""
    from tpukit.tasks.eit.task import EITTask
    from tpukit.tasks.llm.task import SummarizeTask

    gpt = {"model": "4x4x128", "block_size": 128, "init": "scratch", "tokenizer": "gpt2"}
    return {"EIT tiny": EITTask(size="tiny"), "GPT-2 4x4x128": SummarizeTask(**gpt)}


def learner(task, compiled: bool):
    from tpukit.hardware.options import HardwareOptions
    from tpukit.hardware.select import open_backend
    from tpukit.train.config import TrainConfig
    from tpukit.train.run_state import load_learner

    options = HardwareOptions(hw="tpu", precision="fp32", compile=compiled)
    config = TrainConfig(global_batch_size=ROWS, max_steps=1, hw="tpu", precision="fp32")
    return load_learner(task, config, open_backend(options))


class Side:
    """One of the two ways to run a step."""

    def __init__(self, task, batch, compiled: bool) -> None:
        import torch

        self.learner = learner(task, compiled)
        self.tpu = torch.tpu
        self.batch = next(iter(self.learner.backend.batches([batch])))
        self.steps(WARM_STEPS)
        before = self.tpu._get_cache_requests()
        self.steps(STEPS)
        self.launched = (self.tpu._get_cache_requests() - before) / STEPS
        self.seconds = []

    def steps(self, count: int) -> float:
        started = time.monotonic()
        for _ in range(count):
            self.learner.train_step([self.batch], 1e-3)
        self.learner.read_metrics()
        return time.monotonic() - started


def measure(name: str, task) -> dict:
    from tpukit.train.task import PlanSettings

    task = task.for_probing()
    batch = task.probe_batches(PlanSettings(ROWS, ROWS, 1, 0))[0]
    sides = {"eager": Side(task, batch, False), "compiled": Side(task, batch, True)}
    for _ in range(BLOCKS):
        for side in sides.values():
            side.seconds.append(side.steps(STEPS) / STEPS)
    ratios = [
        eager / compiled
        for eager, compiled in zip(sides["eager"].seconds, sides["compiled"].seconds, strict=True)
    ]
    return {
        "network": name,
        **{
            key: {
                "launched_a_step": side.launched,
                "seconds_a_step": side.seconds,
            }
            for key, side in sides.items()
        },
        "ratio_of_times_median": statistics.median(ratios),
        "ratios_of_times": ratios,
    }


def main() -> None:
    if os.environ.get("TORCH_TPU_BENCHMARK") is None:
        paths = [str(PLUGIN), str(PLUGIN.parents[2])]
        variables = {
            "PYTHONPATH": os.pathsep.join(paths),
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            "TORCH_TPU_BENCHMARK": "1",
        }
        command = [sys.executable, *sys.argv]
        sys.exit(subprocess.run(command, env={**os.environ, **variables}, check=False).returncode)
    found = [measure(name, task) for name, task in tasks().items()]
    packages = ("torch", "torch_tpu", "libtpu", "lammps-jax-pjrt-cpu")
    answer = {
        "question": "programs of a training step on torch_tpu, eager and compiled",
        "hardware": "the CPU through a PJRT plugin",
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "rows": ROWS,
        "networks": found,
    }
    print(json.dumps(answer, indent=1))
    write_result(RESULTS / "torch_tpu_compile.json", answer)


if __name__ == "__main__":
    main()
