"""`tpukit doctor --selftest`: its progress, and a report of one page to send."""

from __future__ import annotations

from tpukit.commands.output import Output
from tpukit.commands.reports.machine import as_json, is_failing, issue_report
from tpukit.probe.machine import RealHost, gather
from tpukit.probe.machine.checks.verdict import CheckOptions
from tpukit.probe.selftest.parts import run_selftest


def check_hardware(options: CheckOptions, output: Output, *, strict: bool) -> int:
    """Runs every part, prints the report; the exit code.

    Raises HardwareError where the requested hardware is not here.
    """
    results = list(run_selftest(options, output.text))
    facts = gather(RealHost(), quick=False)
    seconds = sum(result.seconds for result in results)
    output.text()
    output.text(issue_report(facts, results, f"self-test ({seconds:.0f} s)"))
    output.text()
    output.text("Send this report: docs/first_tpu.md says where, and what it is for.")
    failing = [result for result in results if is_failing(result, strict=strict)]
    output.result(as_json(facts, results, ok=not failing))
    return 1 if failing else 0
