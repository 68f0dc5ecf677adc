"""`tpukit doctor` about the machine: facts, checks, the self-test, and a report to paste."""

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from tpukit import __version__
from tpukit.commands.output import Output
from tpukit.hardware.host import Host
from tpukit.io.secrets import without_secrets
from tpukit.io.units import counted
from tpukit.knowledge.environment import allowed
from tpukit.probe.machine.checks import run_checks
from tpukit.probe.machine.devices import describe_devices, device_list
from tpukit.probe.machine.facts import Facts, gather
from tpukit.probe.machine.verdict import CheckOptions, Result

_MARKS = {"pass": "ok  ", "warn": "WARN", "fail": "FAIL", "skip": "-   "}
_ACTION = ("fail", "warn")
_ORDER = (*_ACTION, "skip", "pass")


def check_machine(
    options: CheckOptions, output: Output, *, quick: bool, strict: bool, report: bool, verbose: bool
) -> int:
    """Runs every check, prints what needs action first; the exit code."""
    facts = gather(Host(), quick=quick)
    if not report and not output.as_json:
        output.text(f"tpukit {__version__} on {facts.place.name}: {describe_devices(facts)}")
        if not quick and sys.stdout.isatty():
            output.text("Checking: torch starts in a child process ...")
    results = list(run_checks(facts, options, quick=quick))
    failing = [r for r in results if is_failing(r, strict=strict)]
    if not output.as_json:
        if report:
            output.text(issue_report(facts, results, "doctor"))
        else:
            for line in [*check_lines(results, verbose=verbose), _summary(results, strict=strict)]:
                output.text(line)
    output.result(as_json(facts, results, ok=not failing))
    return 1 if failing else 0


def check_hardware(options: CheckOptions, output: Output, *, strict: bool) -> int:
    """Runs every part, prints the report; the exit code.

    Raises HardwareError where the requested hardware is not here.
    """
    from tpukit.probe.machine.selftest import run_selftest

    facts = gather(Host(), quick=False)
    results = list(run_selftest(facts, options, output.text))
    seconds = sum(result.seconds for result in results)
    output.text()
    output.text(issue_report(facts, results, f"self-test ({seconds:.0f} s)"))
    output.text()
    output.text("Send this report: docs/first_tpu.md says where, and what it is for.")
    failing = [result for result in results if is_failing(result, strict=strict)]
    output.result(as_json(facts, results, ok=not failing))
    return 1 if failing else 0


def check_lines(results: Iterable[Result], *, verbose: bool) -> list[str]:
    """Failures, then warnings, then what was skipped; what passed as one line of names."""
    by_status: dict[str, list[Result]] = {status: [] for status in _ORDER}
    for result in results:
        by_status[result.verdict.status].append(result)
    shown = [r for status in _ORDER for r in by_status[status] if verbose or status in _ACTION]
    lines = [line for result in shown for line in _lines_of(result)]
    counts = [
        f"{len(by_status[status])} {words}"
        for status, words in (("pass", "passed"), ("skip", "skipped"))
        if by_status[status]
    ]
    if counts and not verbose:
        lines.append(f"{_MARKS['pass']} {', '.join(counts)} (--verbose lists them)")
    return lines


def is_failing(result: Result, *, strict: bool) -> bool:
    """Whether a result makes the exit code 1."""
    return result.verdict.status == "fail" or (strict and result.verdict.status == "warn")


def as_json(facts: Facts, results: Iterable[Result], *, ok: bool) -> dict[str, Any]:
    """The one JSON object."""
    return {
        "ok": ok,
        "hardware": {"kind": facts.kind, "devices": device_list(facts), "place": facts.place.name},
        "versions": facts.versions(),
        "checks": [result.as_json() for result in results],
        "findings": [],
        "explanations": [],
    }


def _lines_of(result: Result) -> list[str]:
    verdict = result.verdict
    lines = [f"{_MARKS[verdict.status]} {result.label}: {verdict.message}"]
    if verdict.fix:
        lines += [f"       {line}" for line in verdict.fix.split("\n")]
    return lines


def _summary(results: list[Result], *, strict: bool) -> str:
    failed = sum(result.verdict.status == "fail" for result in results)
    warned = sum(result.verdict.status == "warn" for result in results)
    if failed or (strict and warned):
        return f"Not ready: {failed} failed, {counted(warned, 'warning')}."
    return f"Ready to train ({counted(warned, 'warning')})." if warned else "Ready to train."


def issue_report(facts: Facts, results: Sequence[Result], title: str) -> str:
    """Markdown for an issue: allowed variables only, no user or host names."""
    variables = allowed(facts.host.environment)
    lines = [
        f"### tpukit {__version__} {title}",
        f"- place: {facts.place.name}, {facts.system}, Python {facts.python}",
        f"- hardware: {describe_devices(facts)}",
        f"- versions: {', '.join(f'{k} {v}' for k, v in facts.versions().items())}",
        f"- variables: {', '.join(f'{k}={v}' for k, v in variables.items()) or 'none'}",
        "",
        "```",
        *(line for result in results for line in _lines_of(result)),
        "```",
    ]
    return for_others("\n".join(lines), facts.host.environment.get("HOME", ""))


def for_others(text: str, home: str) -> str:
    """The text without tokens, passwords, and the home folder's name."""
    return without_secrets(text.replace(home, "~") if len(home) > 1 else text)
