"""What a launched rank does in the tests: python rank_script.py SCENARIO."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

SCENARIO = sys.argv[1]
RANK = int(os.environ["RANK"])


def stop_in_order(number, frame):
    time.sleep(RANK)  # one still writes its checkpoint when the other has ended
    print(f"stopped {RANK}", flush=True)
    sys.exit(128 + number)


if SCENARIO == "end":
    print(f"done {RANK} of {os.environ['WORLD_SIZE']}", flush=True)
elif SCENARIO == "bad-input":
    print(f"Error: bad input, says {RANK}", file=sys.stderr)
    sys.exit(2)
elif SCENARIO == "second-fails":
    if RANK == 1:
        print("Error: only the second knows", file=sys.stderr)
        sys.exit(2)
    time.sleep(60)
elif SCENARIO == "second-is-killed":
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
elif SCENARIO == "wait":
    signal.signal(signal.SIGTERM, stop_in_order)
    print(f"waiting {RANK}", flush=True)
    time.sleep(60)
elif SCENARIO == "wait-with-children":
    from torch.utils.data import DataLoader

    from tpukit.io.process import WorkerInit

    loader = iter(
        DataLoader(range(10**9), num_workers=1, worker_init_fn=WorkerInit(),
                   multiprocessing_context="forkserver")
    )  # fmt: skip
    next(loader)
    own = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    own.kill()
    own.wait()
    print(f"waiting {RANK}", flush=True)
    for _ in loader:
        time.sleep(0.1)
