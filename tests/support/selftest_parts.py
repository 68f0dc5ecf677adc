"""Some parts of the self-test in this process' environment: selftest_parts.py HW SECONDS PART...

Prints the results as JSON.
"""

import json
import sys

from tpukit.hardware.host import Host
from tpukit.probe.machine.facts import gather
from tpukit.probe.machine.selftest import PARTS, Part, run_selftest
from tpukit.probe.machine.verdict import CheckOptions


def trains(steps: int, kill_at: int):
    return lambda bench: bench.run(
        "device", "train", folder=str(bench.folder / str(steps)), steps=steps, kill_at=kill_at
    )


FAILING = (
    Part("dies", "A part whose process dies", 60, trains(3, kill_at=1)),
    Part("hangs", "A part without an answer", 1, trains(1_000_000, kill_at=0)),
    Part("works", "A part that works", 60, lambda bench: bench.run("device", "devices")),
)

if __name__ == "__main__":
    hw, seconds, *names = sys.argv[1:]
    parts = tuple(part for part in (*PARTS, *FAILING) if part.id in names)
    asked = CheckOptions(hw=hw, live_seconds=float(seconds))
    facts = gather(Host(), quick=True)
    results = run_selftest(facts, asked, lambda line: print(line, file=sys.stderr), parts)
    print(json.dumps([result.as_json() for result in results]))
