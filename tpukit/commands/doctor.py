"""`tpukit doctor`: checks the environment, scans code, explains logs. Imports no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tpukit.commands.options.option_sets import with_option_sets
from tpukit.commands.output import DebugOption, JsonOption, Output
from tpukit.errors import ConfigError

app = typer.Typer()

LOG_SECONDS = 20.0
"""Time limit of `--explain`."""
LIVE_SECONDS = 120.0
"""Default time limit of the checks that import torch."""
EXCLUSIVE: Mapping[str, Sequence[str]] = {
    "--explain": ("paths",),
    "--report": ("paths", "--explain"),
    "--selftest": ("paths", "--explain", "--quick", "--report"),
}
"""Options, and what each cannot be combined with."""


class HardwareChoice(StrEnum):
    """The hardware to check for."""

    auto = "auto"
    tpu = "tpu"
    gpu = "gpu"
    cpu = "cpu"


class SuccessorChoice(StrEnum):
    """What code moves to."""

    tpu = "tpu"
    torch_tpu = "torch_tpu"


@dataclass(frozen=True)
class ScanOptions:
    """Code to scan, and what to do with it."""

    paths: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PATH...]", help="Python files, notebooks or folders to scan instead."
        ),
    ] = None
    fix: Annotated[
        bool, typer.Option("--fix", help="Rewrite calls that have a single replacement.")
    ] = False
    diff: Annotated[
        bool, typer.Option("--diff", help="Show the changes of --fix without applying them.")
    ] = False
    to: Annotated[
        SuccessorChoice | None,
        typer.Option(
            "--to",
            help="Find what the code needs to move there: CUDA code to a TPU (torch_xla), or"
            " torch_xla code to torch_tpu.",
        ),
    ] = None
    sarif: Annotated[
        Path | None,
        typer.Option("--sarif", metavar="FILE", help="Write the findings as SARIF 2.1.0 as well."),
    ] = None


@dataclass(frozen=True)
class LogOptions:
    """An error log to explain."""

    explain: Annotated[
        str | None,
        typer.Option(
            "--explain", metavar="FILE", help="Explain an error log (`-`: standard input)."
        ),
    ] = None
    knowledge: Annotated[
        list[Path] | None,
        typer.Option("--knowledge", metavar="FILE", help="TOML file with additional known errors."),
    ] = None


@dataclass(frozen=True)
class MachineOptions:
    """What of this machine is checked."""

    quick: Annotated[bool, typer.Option("--quick", help="Skip the checks that import torch.")] = (
        False
    )
    report: Annotated[
        bool, typer.Option("--report", help="Print a report for an issue, without secrets.")
    ] = False
    selftest: Annotated[
        bool,
        typer.Option(
            "--selftest",
            help="Compute, train, kill and resume on the hardware here, in 10 minutes at most,"
            " and print a report to send.",
        ),
    ] = False
    hw: Annotated[HardwareChoice, typer.Option("--hw", help="Hardware to train on.")] = (
        HardwareChoice.auto
    )
    time_limit: Annotated[
        float | None,
        typer.Option(
            "--time-limit",
            min=1.0,
            help="Seconds for the checks that import torch (120), or for --selftest (600).",
        ),
    ] = None


@app.command()
@with_option_sets
def doctor(
    code: ScanOptions,
    log: LogOptions,
    machine: MachineOptions,
    strict: Annotated[bool, typer.Option("--strict", help="Treat warnings as failures.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="List every passed check and every finding.")
    ] = False,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Check the environment, scan code for deprecated calls, explain an error log.

    Without arguments, check whether this machine is ready to train.
    """
    _refuse_mixtures(code, log, machine)
    output = Output(as_json=json)
    if log.explain is not None:
        from tpukit.commands.reports.explanation import explain_file

        failed = explain_file(log.explain, log.knowledge or [], LOG_SECONDS, output)
    elif code.paths:
        from tpukit.commands.reports.code import scan_code

        failed = scan_code(
            code.paths, output, fix=code.fix and not code.diff, show=code.fix or code.diff,
            strict=strict, verbose=verbose, moves=code.to.value if code.to else "",
            sarif=code.sarif,
        )  # fmt: skip
    else:
        failed = _check(machine, output, strict=strict, verbose=verbose)
    raise typer.Exit(failed)


def _check(options: MachineOptions, output: Output, *, strict: bool, verbose: bool) -> int:
    """Checks the machine, or with --selftest its hardware; the exit code."""
    from tpukit.commands.reports.machine import check_hardware, check_machine
    from tpukit.probe.machine.checks.verdict import CheckOptions

    if options.selftest:
        from tpukit.probe.selftest.parts import SELFTEST_SECONDS

        checks = CheckOptions(
            hw=options.hw.value, live_seconds=options.time_limit or SELFTEST_SECONDS
        )
        return check_hardware(checks, output, strict=strict)
    checks = CheckOptions(hw=options.hw.value, live_seconds=options.time_limit or LIVE_SECONDS)
    return check_machine(
        checks, output, quick=options.quick, strict=strict, report=options.report, verbose=verbose
    )


def _refuse_mixtures(code: ScanOptions, log: LogOptions, machine: MachineOptions) -> None:
    given = {
        "paths": bool(code.paths),
        "--explain": log.explain is not None,
        "--quick": machine.quick,
        "--report": machine.report,
        "--selftest": machine.selftest,
    }
    for option, others in EXCLUSIVE.items():
        if given[option] and any(given[other] for other in others):
            raise ConfigError(
                f"doctor: {option} cannot be combined with {', '.join(others)}.",
                "Run them one after the other.",
            )
    if (code.fix or code.diff or code.to or code.sarif) and not code.paths:
        raise ConfigError(
            "doctor: --fix, --diff, --to and --sarif need paths.",
            "Name files: tpukit doctor train.py --diff",
        )
