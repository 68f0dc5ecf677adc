"""Commands that need several ranks: torchrun is started with the same command line."""

from __future__ import annotations

import sys

import typer

from tpukit.commands.output import Output
from tpukit.hardware.options import HardwareOptions, Kind
from tpukit.hardware.select import rank_count


def in_all_ranks(hardware: HardwareOptions, kind: Kind, output: Output) -> None:
    """Returns where this process is a rank; otherwise starts the ranks and exits with them."""
    from tpukit.hardware.launch.launcher import is_launched, launch

    ranks = rank_count(hardware, kind)
    if ranks > 1 and not is_launched():
        output.hand_over()
        raise typer.Exit(launch(sys.argv[1:], ranks, hardware))
