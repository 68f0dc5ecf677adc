"""Seconds from a cell's start to the first training step: a machine that has never run it, and one
that has.

    python benchmarks/first_step.py [--rounds 3] [--out FILE.json]

Each round starts `tpukit` as a cell does, with caches of its own (`TPUKIT_CACHE_DIR`, tokens beside
the data): once without any, once with those of the first. The time ends with the line `First step`;
its own share, compilation included, is the one that the line names.

Beside it a bare script: torch (and torch_xla), the same model, one batch of the same shape made up
in memory, AdamW, one step in the precision that tpukit takes there. It reads no data, writes no log
and checks nothing. The imports are measured too.
"""

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from recorded import table, write_result

VIRTUAL = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1"}
DATA = {
    "eit": ["data", "eit", "--n", "200", "--out"],
    "llm": ["data", "dialogues", "--n", "2000", "--out"],
}
COMMANDS = {
    "eit": ["train", "--preset", "quick", "--max-steps", "2"],
    "llm": ["summarize-train", "--preset", "quick", "--max-steps", "2",
            "--set", "score_samples=0"],
}  # fmt: skip
PLACES = {"cpu": ["--hw", "cpu"], "virtual device": ["--hw", "tpu"]}
BARE = """
import sys, time
import torch
from tpukit.hardware.backend import TorchOps
from tpukit.registry.classes import load_task
from tpukit.train.task import PlanSettings, for_probing

name, settings, device = sys.argv[1], eval(sys.argv[2]), sys.argv[3]
if device == "xla":
    import torch_xla
task = for_probing(load_task(name, settings, "data"))
model = task.build_model(TorchOps()).to(device)
optimizer = torch.optim.AdamW(model.parameters())
batch = {n: t.to(device) for n, t in task.probe_batches(PlanSettings(32, 32, 1, 0))[0].items()}
began = time.perf_counter()
with torch.autocast("xla", torch.bfloat16, enabled=device == "xla"):
    loss = task.loss(model, batch)["loss"].mean()
loss.backward()
optimizer.step()
if device == "xla":
    torch_xla.sync()
loss.item()
print(f"First step: {time.perf_counter() - began:.2f}s", flush=True)
"""
SETTINGS = {
    "eit": {"size": "tiny"},
    "llm": {"model": "3x4x128", "tokenizer": "train", "vocabulary_size": 2048,
            "block_size": 256, "init": "scratch"},
}  # fmt: skip
"""What `--preset quick` says of the model."""
IMPORTS = ("tpukit.cli", "torch", "accelerate", "torch_xla")


def tpukit(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tpukit", *arguments]


def first_step(command: list[str], environment: dict[str, str]) -> dict[str, float]:
    """Wall seconds to the first step, and the step's own."""
    began = time.perf_counter()
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    found: dict[str, float] = {}
    assert process.stdout is not None
    for line in process.stdout:
        if match := re.match(r"First step: (?:(\d+)m)?([\d.]+)s", line):
            found["seconds"] = time.perf_counter() - began
            found["step_seconds"] = 60 * float(match[1] or 0) + float(match[2])
    assert process.wait() == 0 and found, command
    return found


def import_seconds(module: str) -> float:
    """Seconds that a new interpreter takes to import a module and end."""
    began = time.perf_counter()
    environment = {**os.environ, "USE_TORCH_XLA": "0", "TORCH_WARM_POOL": "0", **VIRTUAL}
    subprocess.run(
        [sys.executable, "-c", f"import {module}"], env=environment, check=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    return time.perf_counter() - began


def one_round(task: str, place: str) -> dict[str, dict[str, float]]:
    """The first and the second time on a machine."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = {**os.environ, "TPUKIT_CACHE_DIR": str(folder / "cache")}
        environment |= VIRTUAL if place != "cpu" else {}
        subprocess.run(
            tpukit(*DATA[task], str(folder / "data")), env=environment, check=True,
            capture_output=True,
        )  # fmt: skip
        command = tpukit(*COMMANDS[task], *PLACES[place], "--data-path", str(folder / "data"),
                         "--results-dir", str(folder / "run"))  # fmt: skip
        found = {}
        for when in ("first", "again"):
            found[when] = first_step(command, environment)
            shutil.rmtree(folder / "run")
        environment |= {"USE_TORCH_XLA": "0"} if place == "cpu" else {}
        device = "cpu" if place == "cpu" else "xla"
        bare = [sys.executable, "-c", BARE, task, repr(SETTINGS[task]), device]
        found["bare script"] = first_step(bare, environment)
        return found


def median(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {n: round(statistics.median(r[n] for r in rounds), 2) for n in rounds[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    cases = [(task, place) for task in COMMANDS for place in PLACES]
    rounds = {case: [one_round(*case) for _ in range(options.rounds)] for case in cases}
    imports = {m: [import_seconds(m) for _ in range(options.rounds)] for m in IMPORTS}
    result = {
        "first_step": {
            f"{task}, {place}": {
                when: median([r[when] for r in rounds[task, place]])
                for when in ("first", "again", "bare script")
            }
            for task, place in cases
        },
        "import_seconds": {m: round(statistics.median(s), 2) for m, s in imports.items()},
        "rounds": options.rounds,
        "cores": len(os.sched_getaffinity(0)),
    }
    print(table([
        {"case": case, "times": when, **found}
        for case, each in result["first_step"].items() for when, found in each.items()
    ]))  # fmt: skip
    if options.out:
        write_result(options.out, result)


if __name__ == "__main__":
    main()
