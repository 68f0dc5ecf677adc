"""How long it takes to be told something: tpukit's `--help` and `doctor --quick`, beside
accelerate's `--help` and `env`.

Both sides are started as a user starts them, in turn, in one run; the median of the wall times
counts, and the largest resident set of the process and its children.

    python benchmarks/doctor_start.py --out benchmarks/results/doctor_start.json
"""

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import sysconfig
import time
from importlib.metadata import version
from pathlib import Path

from deciding_code import write_result

BIN = Path(sys.executable).parent
COMMANDS = {
    "tpukit --help": [BIN / "tpukit", "--help"],
    "tpukit doctor --quick": [BIN / "tpukit", "doctor", "--quick"],
    "accelerate --help": [BIN / "accelerate", "--help"],
    "accelerate env": [BIN / "accelerate", "env"],
}
PAIRS = {
    "help": ("tpukit --help", "accelerate --help"),
    "environment": ("tpukit doctor --quick", "accelerate env"),
}


def start(command: list[object]) -> dict[str, float]:
    """One start: wall seconds and the largest resident set in MiB."""
    began = time.perf_counter()
    child = subprocess.Popen(
        [str(part) for part in command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, used = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - began
    assert os.waitstatus_to_exitcode(status) == 0, command
    return {"seconds": seconds, "mib": used.ru_maxrss / 1024}


def median(starts: list[dict[str, float]]) -> dict[str, float]:
    return {
        "seconds": round(statistics.median(s["seconds"] for s in starts), 3),
        "fastest_seconds": round(min(s["seconds"] for s in starts), 3),
        "mib": round(max(s["mib"] for s in starts), 1),
    }


def scan_rate(count: int) -> dict[str, float]:
    """`doctor PATH...` over files drawn from the standard library and the installed packages."""
    folders = [sysconfig.get_paths()[name] for name in ("stdlib", "purelib")]
    files = sorted(str(f) for folder in folders for f in Path(folder).rglob("*.py"))
    chosen = random.Random(0).sample(files, count)
    began = time.perf_counter()
    done = subprocess.run(
        [str(BIN / "tpukit"), "doctor", "--json", *chosen], capture_output=True, check=False
    )
    seconds = time.perf_counter() - began
    answer = json.loads(done.stdout)
    return {
        "files": answer["files"],
        "seconds": round(seconds, 2),
        "findings": len(answer["findings"]),
        "not_parsed": len(answer["notes"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    starts: dict[str, list[dict[str, float]]] = {name: [] for name in COMMANDS}
    for _ in range(options.repeats):
        for name, command in COMMANDS.items():
            starts[name].append(start(command))
    found = {name: median(times) for name, times in starts.items()}
    result = {
        "commands": found,
        "times_faster": {
            pair: round(found[peer]["seconds"] / found[ours]["seconds"], 1)
            for pair, (ours, peer) in PAIRS.items()
        },
        "scan": scan_rate(options.files),
        "repeats": options.repeats,
        "cores": len(os.sched_getaffinity(0)),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("tpukit", "accelerate", "torch", "typer")},
        },
    }
    print(json.dumps(result, indent=2))
    if options.out:
        write_result(options.out, result)


if __name__ == "__main__":
    main()
