"""Some parts of the self-test in this process' environment: selftest_parts.py HW SECONDS PART...

Prints the results as JSON.
"""

from __future__ import annotations

import json
import sys

from tpukit.probe.machine.checks import CheckOptions
from tpukit.probe.selftest.parts import PARTS, run_selftest

if __name__ == "__main__":
    hw, seconds, *names = sys.argv[1:]
    parts = tuple(part for part in PARTS if part.id in names)
    asked = CheckOptions(hw=hw, live_seconds=float(seconds))
    results = run_selftest(asked, lambda line: print(line, file=sys.stderr), parts)
    print(json.dumps([result.as_json() for result in results]))
