"""Seconds from a cell's start to the first training step: a machine that has never run it, and one
that has.

    python benchmarks/first_step.py [--rounds 3] [--out FILE.json]

Each round starts `tpukit` as a cell does, with caches of its own (`TPUKIT_CACHE_DIR`, tokens beside
the data): once without any, once with those of the first. The time ends with the line `First step`;
its own share is the one that the line names. The imports are measured beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

VIRTUAL = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8"}
DATA = {
    "eit": ["data", "eit", "--n", "200", "--out"],
    "summarize": ["data", "dialogues", "--n", "2000", "--out"],
}
COMMANDS = {
    "eit": ["train", "--preset", "quick", "--max-steps", "2"],
    "summarize": ["summarize-train", "--preset", "quick", "--max-steps", "2",
                  "--set", "score_samples=0"],
}  # fmt: skip
PLACES = {"cpu": ["--hw", "cpu"], "8 virtual devices": ["--hw", "tpu"]}
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
                when: median([r[when] for r in rounds[task, place]]) for when in ("first", "again")
            }
            for task, place in cases
        },
        "import_seconds": {m: round(statistics.median(s), 2) for m, s in imports.items()},
        "rounds": options.rounds,
        "cores": len(os.sched_getaffinity(0)),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("tpukit", "torch", "torch_xla", "accelerate")},
        },
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
