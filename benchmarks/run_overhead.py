"""What `tpukit run` costs a program that prints many lines, each one written by itself.

The same program runs directly and under `tpukit run`, in turns, its output read through a pipe and
on a pseudo-terminal. The cost is the difference of the medians of the time from the program's first
line to its last (its own clock), for 1,000 lines; the start of `tpukit run` is measured apart, and
so is the processor time of all processes: the copying runs beside the program.

    python benchmarks/run_overhead.py --out benchmarks/results/run_overhead.json
"""

import argparse
import json
import os
import platform
import pty
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from deciding_code import write_result

LINES = 100_000
PROGRAM = """
import sys, time
write, flush = sys.stdout.write, sys.stdout.flush
begin = time.perf_counter()
for step in range({lines}):
    write(f"step {{step}} loss 1.2345 lr 3.0e-4 tokens/s 123456.7 time 12.3 ms\\n")
    flush()
sys.stderr.write(str(time.perf_counter() - begin))
"""


def drain(descriptor: int) -> None:
    try:
        while os.read(descriptor, 1 << 16):
            pass
    except OSError:  # the end of a pseudo-terminal
        pass


def seconds(command: list[str], *, on_terminal: bool) -> tuple[float, float, float]:
    """(from the first line to the last, whole process, processor time of all processes)."""
    source, end = pty.openpty() if on_terminal else os.pipe()
    reader = threading.Thread(target=drain, args=(source,))
    begin, used = time.perf_counter(), processor_seconds()
    with tempfile.TemporaryFile() as told:
        process = subprocess.Popen(command, stdout=end, stderr=told, stdin=subprocess.DEVNULL)
        os.close(end)
        reader.start()
        process.wait()
        whole = time.perf_counter() - begin
        reader.join()
        told.seek(0)
        return float(told.read().decode() or 0), whole, processor_seconds() - used


def processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measured(rounds: int, *, on_terminal: bool, folder: str) -> dict[str, Any]:
    program = [sys.executable, "-c", PROGRAM.format(lines=LINES)]
    run = [sys.executable, "-m", "tpukit", "run", "--log", f"{folder}/log", "--"]
    direct, under, start = [], [], []
    for _ in range(rounds):
        direct.append(seconds(program, on_terminal=on_terminal))
        under.append(seconds([*run, *program], on_terminal=on_terminal))
        start.append(seconds([*run, "true"], on_terminal=on_terminal))
    costs = [
        statistics.median(s[part] for s in under) - statistics.median(s[part] for s in direct)
        for part in range(3)
    ]
    starts = [statistics.median(s[part] for s in start) for part in range(3)]
    return {
        "direct_seconds": [round(s[0], 4) for s in direct],
        "under_run_seconds": [round(s[0], 4) for s in under],
        "milliseconds_in_1000_lines": round(costs[0] / LINES * 1e6, 3),
        "processor_milliseconds_in_1000_lines": round((costs[2] - starts[2]) / LINES * 1e6, 3),
        "start_seconds": round(starts[1], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = {
            "lines": LINES,
            "python": platform.python_version(),
            "cores": os.cpu_count(),
            "load": round(os.getloadavg()[0], 1),
            "pipe": measured(options.rounds, on_terminal=False, folder=folder),
            "terminal": measured(options.rounds, on_terminal=True, folder=folder),
        }
    if options.out:
        write_result(options.out, result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
