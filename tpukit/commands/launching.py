"""Commands that need several processes: torchrun is started with the same command line."""

from __future__ import annotations

import sys

import typer

from tpukit.commands.output import Output
from tpukit.hardware.options import HardwareOptions, Kind
from tpukit.hardware.select import rank_count


def in_all_processes(hardware: HardwareOptions, kind: Kind, output: Output) -> None:
    """Returns where this process is one of those that work; starts them and ends otherwise."""
    from tpukit.hardware.launch.launcher import is_launched, launch

    processes = rank_count(hardware, kind)
    if processes > 1 and not is_launched():
        output.hand_over()
        raise typer.Exit(launch(sys.argv[1:], processes, hardware))
