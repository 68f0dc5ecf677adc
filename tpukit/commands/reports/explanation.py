"""`tpukit doctor --explain`: explains an error log, causes first."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tpukit.commands.output import Output
from tpukit.knowledge.error_table import ROLES, Role, read_known_errors
from tpukit.probe.logs import ExplainedLog, explain_log, open_log
from tpukit.probe.logs.matching import Explanation

_HEADINGS: dict[Role, str] = {
    "cause": "Cause",
    "consequence": "Consequence",
    "warning": "Warning",
    "harmless": "Harmless",
}


def explain_file(name: str, knowledge: Sequence[Path], seconds: float, output: Output) -> None:
    """Prints the explanations of a log, or that it has no known error."""
    entries = read_known_errors(knowledge)
    log = explain_log(open_log(name, seconds), entries)
    for line in _report_lines(log):
        output.text(line)
    output.result({
        "ok": True,
        "hardware": None,
        "versions": {},
        "checks": [],
        "findings": [],
        "explanations": [explanation.as_json() for explanation in log.explanations],
        "unknown": [{"line": line.number, "text": line.text} for line in log.unknown],
        "lines": log.lines,
        "notes": log.notes,
    })  # fmt: skip


def _report_lines(log: ExplainedLog) -> list[str]:
    lines = list(log.notes)
    for role in ROLES:
        same = [e for e in log.explanations if e.entry.role == role]
        for index, explanation in enumerate(same):
            lines += _explanation(explanation, _heading(role, index, log))
    if not log.explanations:
        lines.append(f"No known error in these {log.lines} lines.")
        lines += [f"  Possibly an error, line {e.number}: {e.text[:200]}" for e in log.unknown]
        lines.append("  Add your own entries with --knowledge FILE (see docs/doctor.md).")
    elif log.explanations[0].entry.role == "consequence":
        lines.append(
            "The cause is not in this log: look for the first error in the logs of all ranks."
        )
    return [_printable(line) for line in lines]


def _heading(role: Role, index: int, log: ExplainedLog) -> str:
    return "First cause" if role == "cause" and index == 0 else _HEADINGS[role]


def _explanation(explanation: Explanation, heading: str) -> list[str]:
    times = f", {explanation.count} times" if explanation.count > 1 else ""
    lines = [
        f"{heading} (line {explanation.line}{times}, {explanation.id}): {explanation.text[:200]}",
        f"  why: {explanation.cause}",
        f"  do:  {explanation.fix}",
    ]
    if explanation.entry.source:
        lines.append(f"  see: {explanation.entry.source}")
    return [*lines, ""]


def _printable(text: str) -> str:
    """The text without control characters."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", "", text)
