"""What torchrun runs as each rank: a module, whose exit code is written for the launcher.

python -m tpukit.hardware.launch.rank MODULE ARGUMENTS
"""

import os
import runpy
import sys
import time
import traceback
from pathlib import Path

from tpukit.hardware.launch.failures import end_rank
from tpukit.hardware.launch.launcher import STATUS_VARIABLE, leave_status, read_statuses
from tpukit.io.files import write_file
from tpukit.io.interrupts import STOPPED_CODES
from tpukit.io.process import die_with_parent

SECONDS_FOR_RANK_0 = 1.0


def main() -> None:
    """Runs the module as this rank."""
    die_with_parent()
    rank = int(os.environ["RANK"])
    status = Path(os.environ[STATUS_VARIABLE])
    write_file(status / f"pid-{rank}", str(os.getpid()).encode(), sync=False)
    if rank != 0:
        _redirect_output(status / f"output-{rank}.txt")
    end_rank(_leave_exit_code(status, rank))


def _leave_exit_code(status: Path, rank: int) -> int:
    code = _run()
    leave_status(code)
    # torchrun ends all ranks when one fails, but ranks that were asked to stop may still be
    # writing their checkpoint: to torchrun they succeed.
    if code in STOPPED_CODES:
        return 0
    if code and rank != 0:
        _let_rank_0_fail(status)
    return code


def _let_rank_0_fail(status: Path) -> None:
    """Waits, not for long, for rank 0: it may be about to log and leave the same error."""
    until = time.monotonic() + SECONDS_FOR_RANK_0
    while time.monotonic() < until and not any(s.rank == 0 for s in read_statuses(status)):
        time.sleep(0.05)


def _run() -> int:
    # By name: this layer does not import the command line above it.
    module = sys.argv[1]
    sys.argv = [module, *sys.argv[2:]]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=False)
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def _redirect_output(file: Path) -> None:
    """Rank 0 prints; the other ranks' output is shown only if one of them fails."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


if __name__ == "__main__":
    main()
