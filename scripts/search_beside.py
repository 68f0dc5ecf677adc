"""A batch search on this machine's CPU beside a process that holds memory.

    python scripts/search_beside.py                    the machine as it is
    python scripts/search_beside.py --hold 18          beside 18 GiB that are in use
    python scripts/search_beside.py --hold 18 --out FILE -- --task images --model resnet18

Runs `tpukit probe-batch --start 4 --hw cpu --json` with what follows `--`. Prints its answer, its
seconds, the least memory that was available and the processes that the kernel killed for lack of
it, as JSON. Exit code 1: something was killed, or there was no answer within 15 minutes.
"""

import argparse
import json
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import psutil

MOST_SECONDS = 900.0
HOLD = "import sys; held = b'x' * int(sys.argv[1]); print(len(held), flush=True); input()"
KEYS = (
    "largest_batch_per_device", "recommended_batch_per_device", "slow_batch_per_device",
    "estimated_largest_batch_per_device", "stopped_by", "limit_bytes", "trials", "id", "error",
)  # fmt: skip


def kernel_kills() -> int:
    """Processes that the kernel has killed for lack of memory since it started."""
    counts = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    return int(counts["oom_kill"])


def search(options: list[str]) -> dict[str, object]:
    command = [sys.executable, "-m", "tpukit", "probe-batch", "--start", "4", "--hw", "cpu"]
    started, kills = time.monotonic(), kernel_kills()
    least = psutil.virtual_memory().available
    found = {"command": [*command[2:], *options], "available_bytes": least}
    process = subprocess.Popen([*command, "--json", *options], stdout=subprocess.PIPE, text=True)
    while process.poll() is None:
        least = min(least, psutil.virtual_memory().available)
        time.sleep(0.05)
    assert process.stdout is not None
    try:
        answer = json.loads(process.stdout.read())
    except ValueError:
        answer = {"error": "no JSON"}
    return found | {
        "exit_code": process.returncode,
        "seconds": time.monotonic() - started,
        "least_available_bytes": least,
        "killed_by_the_kernel": kernel_kills() - kills,
        "answer": {key: answer[key] for key in KEYS if key in answer},
    }


def main() -> int:
    parse = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parse.add_argument("--hold", type=float, default=0.0, help="GiB that another process holds")
    parse.add_argument("--out", type=Path)
    parse.add_argument("options", nargs="*")
    asked = parse.parse_args()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(int(asked.hold * 2**30))],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert holder.stdout is not None
    holder.stdout.readline()
    try:
        found = search(asked.options)
        found["holder_lives"] = holder.poll() is None
    finally:
        holder.kill()
    versions = {"python": sys.version.split()[0], "torch": version("torch")}
    memory = psutil.virtual_memory().total
    report = {"held_gib": asked.hold, "memory_bytes": memory, **versions, **found}
    text = json.dumps(report, indent=2)
    print(text)
    if asked.out:
        asked.out.write_text(text + "\n")
    ended_well = found["holder_lives"] and not found["killed_by_the_kernel"]
    in_time = float(str(found["seconds"])) <= MOST_SECONDS
    return int(not (ended_well and in_time and found["exit_code"] == 0))


if __name__ == "__main__":
    sys.exit(main())
