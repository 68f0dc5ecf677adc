"""What a launched rank does in the tests: python rank_script.py SCENARIO."""

import atexit
import os
import signal
import subprocess
import sys
import time

SCENARIO = sys.argv[1]
RANK = int(os.environ["RANK"])


if SCENARIO == "end":
    print(f"done {RANK} of {os.environ['WORLD_SIZE']}", flush=True)
elif SCENARIO == "bad-input":
    time.sleep(2 * RANK)  # of the second, which ends first, the launcher would show the error too
    print(f"Error: bad input, says {RANK}", file=sys.stderr)
    sys.exit(2)
elif SCENARIO.startswith("both-fail"):
    from tpukit.hardware.launch.launcher import leave_status

    ends_first = 0 if SCENARIO == "both-fail-0" else 1
    # torchrun ends the other one before it has left its error, or after.
    if ends_first == RANK or SCENARIO != "both-fail-alone":
        leave_status(2, error_id="data", stderr="Error: both\n  know\n", stdout=f"{{}} {RANK}\n")
    if ends_first == RANK:
        sys.exit(2)
    time.sleep(60)
elif SCENARIO in ("second-raises", "second-raises-once"):
    import torch.distributed as dist

    from tpukit.errors import UsageError
    from tpukit.hardware.options import HardwareOptions
    from tpukit.hardware.select import opened_backend

    raises = SCENARIO == "second-raises" or os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    leave = dist.destroy_process_group
    try:
        with opened_backend(HardwareOptions(hw="cpu", devices=2)) as backend:
            if raises:
                # As NCCL's, which waits for the other ranks.
                dist.destroy_process_group = lambda: time.sleep(600)
                # And as the group's own end, where the interpreter ends with it.
                atexit.register(time.sleep, 600)
            if RANK == 1 and raises:
                raise UsageError("only the second knows")
            backend.all_gather_objects(None)
            print(f"done {RANK}", flush=True)
    except UsageError as error:
        print(f"Error: {error.message}", file=sys.stderr)
        sys.exit(error.exit_code)
elif SCENARIO == "second-raises-beside-one-that-hangs":
    if RANK == 1:
        print("Error: only the second knows", file=sys.stderr)
        sys.exit(2)
    # Python's handlers do not run while the main thread waits for a device.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    time.sleep(600)
elif SCENARIO == "second-is-killed":
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
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
