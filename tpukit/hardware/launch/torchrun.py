"""torchrun as the launcher's child: ends with it, and does not log the ranks' failures.

python -m tpukit.hardware.launch.torchrun TORCHRUN'S ARGUMENTS
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
from pathlib import Path

from tpukit.hardware.launch.launcher import STATUS_VARIABLE
from tpukit.hardware.tpu_stack import RANKS_VARIABLE
from tpukit.io.process import PARENT_VARIABLE, die_with_parent


def main() -> int:
    """torchrun's exit code."""
    die_with_parent(int(os.environ[PARENT_VARIABLE]))
    # Its log is a page of tracebacks about a rank that has printed its own error.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    logging.getLogger("torch.distributed.run").setLevel(logging.CRITICAL)
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    if ranks := os.environ.get(RANKS_VARIABLE):
        _describe_tpu(int(ranks))
    try:
        torchrun(sys.argv[1:])
    except ChildFailedError as failed:
        _name_killed({rank: failure.exitcode for rank, failure in failed.failures.items()})
        return 1
    except SignalException as stop:
        return 128 + int(stop.sigval)
    return 0


def _describe_tpu(ranks: int) -> None:
    """Sets the topology and the addresses by which torch_tpu's ranks find each other."""
    importlib.import_module("torch_tpu")  # makes torch.tpu
    distributed = importlib.import_module("torch.tpu.distributed")
    distributed.set_tpu_launch_env(nproc_per_node=ranks)


def _name_killed(exit_codes: dict[int, int]) -> None:
    """Writes which signals ended ranks."""
    status = Path(os.environ[STATUS_VARIABLE])
    for rank, code in exit_codes.items():
        if code < 0:
            (status / f"killed-{rank}").write_text(signal.Signals(-code).name)


if __name__ == "__main__":
    sys.exit(main())
