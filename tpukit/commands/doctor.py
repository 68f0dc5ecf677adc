"""`tpukit doctor`: checks the environment, scans code, explains logs. Imports no torch."""

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
MASTER_PORT = 29500
"""torchrun's."""


class HardwareChoice(StrEnum):
    """The hardware to check for."""

    auto = "auto"
    tpu = "tpu"
    gpu = "gpu"
    cpu = "cpu"


class SuccessorChoice(StrEnum):
    """What follows torch_xla."""

    torch_tpu = "torch_tpu"


@app.command()
def doctor(
    paths: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PATH...]", help="Python files, notebooks or folders to scan instead."
        ),
    ] = None,
    explain: Annotated[
        str | None,
        typer.Option(
            "--explain", metavar="FILE", help="Explain an error log (`-`: standard input)."
        ),
    ] = None,
    knowledge: Annotated[
        list[Path] | None,
        typer.Option("--knowledge", metavar="FILE", help="TOML file with additional known errors."),
    ] = None,
    fix: Annotated[
        bool, typer.Option("--fix", help="Rewrite calls that have a single replacement.")
    ] = False,
    diff: Annotated[
        bool, typer.Option("--diff", help="Show the changes of --fix without applying them.")
    ] = False,
    to: Annotated[
        SuccessorChoice | None,
        typer.Option("--to", help="Find what torch_xla code needs to move there instead."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Skip the checks that import torch.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Treat warnings as failures.")] = False,
    report: Annotated[
        bool, typer.Option("--report", help="Print a report for an issue, without secrets.")
    ] = False,
    selftest: Annotated[
        bool,
        typer.Option(
            "--selftest",
            help="Compute, train, kill and resume on the hardware here, in 10 minutes at most,"
            " and print a report to send.",
        ),
    ] = False,
    hosts: Annotated[
        str | None,
        typer.Option(
            "--hosts",
            metavar="A,B",
            help="Compare these hosts over ssh: versions, data, clocks, and whether each reaches"
            " the others' port.",
        ),
    ] = None,
    data_path: Annotated[
        str | None, typer.Option("--data-path", help="With --hosts, the data to compare.")
    ] = None,
    master_port: Annotated[
        int | None,
        typer.Option(
            "--master-port", min=1, max=65535, help="With --hosts, the port to try (29500)."
        ),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="List every passed check and every finding.")
    ] = False,
    hw: Annotated[
        HardwareChoice, typer.Option("--hw", help="Hardware to train on.")
    ] = HardwareChoice.auto,
    time_limit: Annotated[
        float | None,
        typer.Option(
            "--time-limit",
            min=1.0,
            help="Seconds for the checks that import torch (120), or for --selftest (600).",
        ),
    ] = None,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Check the environment, scan code for deprecated calls, explain an error log.

    Without arguments, check whether this machine is ready to train.
    """
    _refuse_mixtures(paths or [], explain, fix or diff or to is not None, report)
    if selftest and (paths or explain is not None or quick or report):
        raise ConfigError(
            "doctor: --selftest cannot be combined with paths, --explain, --quick or --report.",
            "Run them one after the other.",
        )
    if hosts is None and (data_path is not None or master_port is not None):
        raise ConfigError(
            "doctor: --data-path and --master-port are of --hosts.", "Add --hosts node1,node2."
        )
    if hosts is not None and (paths or explain is not None or quick or report or selftest):
        raise ConfigError(
            "doctor: --hosts cannot be combined with paths, --explain, --quick, --report or"
            " --selftest.",
            "Run them one after the other.",
        )
    output = Output(as_json=json)
    if explain is not None:
        from tpukit.commands.reports.explanation import explain_file

        explain_file(explain, knowledge or [], LOG_SECONDS, output)
        return
    if paths:
        from tpukit.commands.reports.code import scan_code

        write = fix and not diff
        code = scan_code(
            paths,
            output,
            fix=write,
            show=fix or diff,
            strict=strict,
            verbose=verbose,
            moves=to is not None,
        )
    elif hosts is not None:
        from tpukit.commands.reports.hosts import check_hosts, host_names

        code = check_hosts(
            host_names(hosts),
            data_path,
            master_port or MASTER_PORT,
            output,
            strict=strict,
            verbose=verbose,
        )
    elif selftest:
        from tpukit.commands.reports.selftest import check_hardware
        from tpukit.probe.machine.checks.verdict import Asked
        from tpukit.probe.selftest.parts import SELFTEST_SECONDS

        asked = Asked(hw=hw.value, live_seconds=time_limit or SELFTEST_SECONDS)
        code = check_hardware(asked, output, strict=strict)
    else:
        from tpukit.commands.reports.machine import check_machine
        from tpukit.probe.machine.checks.verdict import Asked

        asked = Asked(hw=hw.value, live_seconds=time_limit or LIVE_SECONDS)
        code = check_machine(
            asked, output, quick=quick, strict=strict, report=report, verbose=verbose
        )
    raise typer.Exit(code)


def _refuse_mixtures(paths: list[str], explain: str | None, rewrites: bool, report: bool) -> None:
    if explain is not None and paths:
        raise ConfigError(
            "doctor: --explain cannot be combined with paths.", "Run them one after the other."
        )
    if rewrites and not paths:
        raise ConfigError(
            "doctor: --fix, --diff and --to need paths.",
            "Name files: tpukit doctor train.py --diff",
        )
    if report and (paths or explain is not None):
        raise ConfigError(
            "doctor: --report cannot be combined with paths or --explain.", "Remove them."
        )
