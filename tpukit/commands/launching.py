"""Several ranks: a command starts torchrun with its own command line, a Python call does not."""

from __future__ import annotations

import sys
from collections.abc import Callable

import typer

from tpukit.commands.output import Output
from tpukit.errors import HardwareError
from tpukit.hardware.options import HardwareOptions, Kind
from tpukit.hardware.select import prepare_environment, rank_count


def in_all_ranks(hardware: HardwareOptions, kind: Kind, output: Output) -> None:
    """Returns where this process is a rank; otherwise starts the ranks and exits with them."""
    from tpukit.hardware.launch.launcher import is_launched, launch

    ranks = rank_count(hardware, kind)
    if (ranks > 1 or hardware.max_restarts) and not is_launched():
        output.hand_over()
        raise typer.Exit(launch(sys.argv[1:], ranks, hardware))


def in_this_process(hardware: HardwareOptions, log: Callable[[str], None]) -> None:
    """Prepares a call from Python, which is one rank: one GPU, or all devices of a TPU host.

    Raises HardwareError where several ranks were requested and no launcher started them.
    """
    from tpukit.hardware.launch.launcher import is_launched

    kind = prepare_environment(hardware)
    ranks = rank_count(hardware, kind)
    if ranks == 1 or is_launched():
        return
    way = f"the command (`tpukit train --task FILE:CLASS`), `torchrun --nproc-per-node {ranks}`"
    if hardware.devices is None and kind == "gpu":
        log(f"Using 1 of {ranks} GPUs: a call from Python is one process. For all: {way}.")
        return
    raise HardwareError(
        f"{ranks} {kind.upper()} devices take {ranks} processes; a call from Python is one.",
        f"Use {way} with your script, or devices=1.",
        id="one-process",
    )
