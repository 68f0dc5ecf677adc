"""torchrun as the launcher's child: ends with it, and does not log the ranks' failures.

python -m tpukit.hardware.launch.torchrun TORCHRUN'S ARGUMENTS
"""

import importlib
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from tpukit.hardware.launch.launcher import LOOPBACK, STATUS_VARIABLE
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
    _listen_on_loopback()
    try:
        torchrun(sys.argv[1:])
    except ChildFailedError as failed:
        # The launcher names the signals.
        codes = {rank: failure.exitcode for rank, failure in failed.failures.items()}
        if set(codes.values()) != {-signal.SIGTERM}:
            # torchrun's own, to those that were left when the first failed: newer ones list them.
            codes = {rank: code for rank, code in codes.items() if code != -signal.SIGTERM}
        for rank, code in codes.items():
            if code < 0:
                file = Path(os.environ[STATUS_VARIABLE]) / f"killed-{rank}"
                file.write_text(signal.Signals(-code).name)
        return 1
    except SignalException as stop:
        return 128 + int(stop.sigval)
    return 0


def _describe_tpu(ranks: int) -> None:
    """Sets the topology and the addresses by which torch_tpu's ranks find each other."""
    importlib.import_module("torch_tpu")  # makes torch.tpu
    distributed = importlib.import_module("torch.tpu.distributed")
    distributed.set_tpu_launch_env(nproc_per_node=ranks)


def _listen_on_loopback() -> None:
    """Keeps torchrun's stores, which trust whoever connects, off the network: one host needs none.

    torch binds them to every interface and offers no option but a socket that listens already.
    """
    import torch.distributed as dist
    from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend, static_tcp_rendezvous

    everywhere: Any = dist.TCPStore  # type: ignore[attr-defined]

    class LoopbackStore(everywhere):  # type: ignore[misc]
        def __init__(
            self, host_name: str, port: int, world_size: int | None = None,
            is_master: bool = False, *arguments: Any, **options: Any,
        ) -> None:  # fmt: skip
            if is_master:
                listening = socket.create_server((LOOPBACK, port))
                port = listening.getsockname()[1]
                options["master_listen_fd"] = listening.detach()
            super().__init__(LOOPBACK, port, world_size, is_master, *arguments, **options)

    for module in (dist, c10d_rendezvous_backend, static_tcp_rendezvous):
        module.TCPStore = LoopbackStore  # type: ignore[attr-defined]


if __name__ == "__main__":
    sys.exit(main())
