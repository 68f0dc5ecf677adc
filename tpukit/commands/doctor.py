"""`tpukit doctor`: the environment, a user's code, an error log. Imports no torch."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tpukit.commands.output import DebugOption, JsonOption, Output
from tpukit.errors import ConfigError

app = typer.Typer()

LOG_SECONDS = 20.0
LIVE_SECONDS = 120.0


class Hardware(StrEnum):
    """What the machine is wanted for."""

    auto = "auto"
    tpu = "tpu"
    gpu = "gpu"
    cpu = "cpu"


@app.command()
def doctor(
    paths: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PATH...]", help="Code to scan instead: Python files, notebooks, folders."
        ),
    ] = None,
    explain: Annotated[
        str | None,
        typer.Option("--explain", metavar="FILE", help="Explain an error log (`-`: from a pipe)."),
    ] = None,
    knowledge: Annotated[
        list[Path] | None,
        typer.Option("--knowledge", metavar="FILE", help="Your own error texts besides (TOML)."),
    ] = None,
    fix: Annotated[
        bool, typer.Option("--fix", help="Rewrite what has one right replacement.")
    ] = False,
    diff: Annotated[
        bool, typer.Option("--diff", help="Show what --fix would change, and change nothing.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Leave out the checks that start torch.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings fail as well.")] = False,
    report: Annotated[
        bool, typer.Option("--report", help="A text to paste into an issue; no secrets in it.")
    ] = False,
    hw: Annotated[
        Hardware, typer.Option("--hw", help="What you want to train on.")
    ] = Hardware.auto,
    time_limit: Annotated[
        float,
        typer.Option("--time-limit", min=1.0, help="Seconds for the checks that start torch."),
    ] = LIVE_SECONDS,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Check the environment, scan code for deprecated calls, explain an error log.

    Without arguments: is this machine ready to train?
    """
    _refuse_mixtures(paths or [], explain, fix or diff, report)
    output = Output(as_json=json)
    if explain is not None:
        from tpukit.commands.reports.explanation import explain_file

        explain_file(explain, knowledge or [], LOG_SECONDS, output)
        return
    if paths:
        from tpukit.commands.reports.code import scan_code

        code = scan_code(paths, output, fix=fix and not diff, show=fix or diff, strict=strict)
    else:
        from tpukit.commands.reports.machine import check_machine
        from tpukit.probe.machine.checks.verdict import Asked

        asked = Asked(hw=hw.value, live_seconds=time_limit)
        code = check_machine(asked, output, quick=quick, strict=strict, report=report)
    raise typer.Exit(code)


def _refuse_mixtures(paths: list[str], explain: str | None, rewrites: bool, report: bool) -> None:
    if explain is not None and paths:
        raise ConfigError(
            "doctor: --explain and code to scan at once.", "Ask for one after the other."
        )
    if rewrites and not paths:
        raise ConfigError(
            "doctor: --fix and --diff need code.", "Name files: tpukit doctor train.py --diff"
        )
    if report and (paths or explain is not None):
        raise ConfigError("doctor: --report is about the machine.", "Leave the files out.")
