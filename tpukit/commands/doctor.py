"""`tpukit doctor`: checks the environment, scans code, explains logs. Imports no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tpukit.commands.options.option_sets import options_of, with_option_sets
from tpukit.commands.output import DebugOption, JsonOption, Output
from tpukit.errors import ConfigError
from tpukit.io.ranges import Range, setting

app = typer.Typer()

LOG_SECONDS = 20.0
"""Time limit of `--explain`."""
LIVE_SECONDS = 120.0
"""Default time limit of the checks that import torch."""
MOST_SECONDS = 86400.0
"""Longest time limit."""
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
    """What to do with the code that is scanned."""

    fix: bool = False
    """Rewrite calls that have a single replacement."""
    diff: bool = False
    """Show the changes of --fix without applying them."""
    to: SuccessorChoice | None = None
    """Find what the code needs to move there: CUDA code to a TPU (torch_xla), or torch_xla code to
    torch_tpu."""
    sarif: Path | None = setting(None, metavar="FILE")
    """Write the findings as SARIF 2.1.0 as well."""


@dataclass(frozen=True)
class LogOptions:
    """An error log to explain."""

    explain: str | None = setting(None, metavar="FILE")
    """Explain an error log (`-`: standard input)."""
    knowledge: list[Path] | None = setting(None, metavar="FILE")
    """TOML file with additional known errors."""


@dataclass(frozen=True)
class MachineOptions:
    """What of this machine is checked."""

    quick: bool = False
    """Skip the checks that import torch."""
    report: bool = False
    """Print a report for an issue, without secrets."""
    selftest: bool = False
    """Compute, train, kill and resume on the hardware here, in 10 minutes at most, and print a
    report to send."""
    hw: HardwareChoice = HardwareChoice.auto
    """Hardware to train on."""
    time_limit: float | None = setting(None, Range(1, MOST_SECONDS, whole=False), unit="DURATION")
    """Time for the checks that import torch (default: 2m), or for --selftest (10m)."""


@app.command()
@with_option_sets
def doctor(
    code: Annotated[ScanOptions, options_of(ScanOptions)],
    log: Annotated[LogOptions, options_of(LogOptions)],
    machine: Annotated[MachineOptions, options_of(MachineOptions)],
    paths: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PATH...]", help="Python files, notebooks or folders to scan instead."
        ),
    ] = None,
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
    _refuse_mixtures(paths, code, log, machine)
    output = Output(as_json=json)
    if log.explain is not None:
        from tpukit.commands.reports.explanation import explain_file

        failed = explain_file(log.explain, log.knowledge or [], LOG_SECONDS, output)
    elif paths:
        from tpukit.commands.reports.code import scan_code

        failed = scan_code(
            paths, output, fix=code.fix and not code.diff, show=code.fix or code.diff,
            strict=strict, verbose=verbose, moves=code.to.value if code.to else "",
            sarif=code.sarif,
        )  # fmt: skip
    else:
        failed = _check(machine, output, strict=strict, verbose=verbose)
    raise typer.Exit(failed)


def _check(options: MachineOptions, output: Output, *, strict: bool, verbose: bool) -> int:
    """Checks the machine, or with --selftest its hardware; the exit code."""
    from tpukit.commands.reports.machine import check_hardware, check_machine
    from tpukit.probe.machine.verdict import CheckOptions

    if options.selftest:
        from tpukit.probe.machine.selftest import SELFTEST_SECONDS

        checks = CheckOptions(
            hw=options.hw.value, live_seconds=options.time_limit or SELFTEST_SECONDS
        )
        return check_hardware(checks, output, strict=strict)
    checks = CheckOptions(hw=options.hw.value, live_seconds=options.time_limit or LIVE_SECONDS)
    return check_machine(
        checks, output, quick=options.quick, strict=strict, report=options.report, verbose=verbose
    )


def _refuse_mixtures(
    paths: Sequence[str] | None, code: ScanOptions, log: LogOptions, machine: MachineOptions
) -> None:
    given = {
        "paths": bool(paths),
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
    if (code.fix or code.diff or code.to or code.sarif) and not paths:
        raise ConfigError(
            "doctor: --fix, --diff, --to and --sarif need paths.",
            "Name files: tpukit doctor train.py --diff",
        )
