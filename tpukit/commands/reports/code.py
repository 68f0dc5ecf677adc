"""`tpukit doctor PATH...`: reports removed and deprecated calls in a user's code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tpukit.commands.output import Output
from tpukit.commands.reports.sarif import write_sarif
from tpukit.io.units import counted
from tpukit.knowledge.calls import successor
from tpukit.probe.lint import Finding, ScanResult, scan_paths

if TYPE_CHECKING:
    from tpukit.probe.lint.fix import FileFix

_LINES_NAMED = 5
"""Maximum number of further places of one reason that are named; the rest is counted."""


def scan_code(
    paths: Sequence[str],
    output: Output,
    *,
    fix: bool,
    show: bool,
    strict: bool,
    verbose: bool,
    moves: str = "",
    sarif: Path | None = None,
) -> int:
    """Scans, shows or applies the requested changes; returns the exit code."""
    fixes = _rewrite(paths, output, write=fix, moves=moves) if show else []
    report = scan_paths(paths, moves=moves)
    if sarif is not None:
        write_sarif(sarif, report.findings)
    if not output.as_json:
        for line in report_lines(report, verbose=verbose):
            output.text(line)
    failing = [f for f in report.findings if f.status == "removed" or strict]
    output.result({
        "ok": not failing,
        "hardware": None,
        "versions": {},
        "checks": [],
        "findings": [finding.as_json() for finding in report.findings],
        "explanations": [],
        "changed": [str(planned.path) for planned in fixes if fix],
        "diffs": [{"path": str(planned.path), "diff": planned.diff} for planned in fixes],
        "files": report.files,
        "notes": [*report.notes, *(note for planned in fixes for note in _remarks(planned))],
    })  # fmt: skip
    return 1 if failing else 0


def _rewrite(paths: Sequence[str], output: Output, *, write: bool, moves: str) -> list[FileFix]:
    """Prints the diffs, with `write` applies them; what was planned for each file."""
    from tpukit.probe.lint.fix import apply_fix, plan_fixes

    fixes = plan_fixes(paths, moves=moves)
    for fix in fixes:
        backup = apply_fix(fix) if write else None
        if output.as_json:
            continue
        output.text(fix.diff)
        for remark in _remarks(fix):
            output.text(f"note: {remark}")
        if write:
            kept = f"; backup: {backup}" if backup else ""
            output.text(f"{fix.path}: {counted(fix.rewritten, 'place')} rewritten{kept}")
    return fixes


def _remarks(fix: FileFix) -> list[str]:
    return [f"{fix.path}: {remark}" for remark in fix.remarks]


def report_lines(report: ScanResult, *, verbose: bool) -> list[str]:
    """One line for each reason in a file (`verbose`: for each finding), and their sums."""
    groups: dict[object, list[Finding]] = {}
    for number, finding in enumerate(report.findings):
        reason = (finding.path, finding.id, finding.new, finding.status, finding.remark)
        groups.setdefault(number if verbose else reason, []).append(finding)
    # What ends a run comes first.
    ordered = sorted(groups.values(), key=lambda group: group[0].status != "removed")
    lines = [_line(group) for group in ordered]
    lines += [f"note: {note}" for note in report.notes]
    lines.append(_sums(report))
    if any(finding.since.startswith("torch_xla") for finding in report.findings):
        lines.append(f"{successor().words} ({successor().source}).")
    if any(finding.fixable for finding in report.findings):
        lines.append(
            "`--diff` shows what `--fix` rewrites; `# tpukit: ignore` suppresses a line's findings."
        )
    return lines


def _sums(report: ScanResult) -> str:
    counts = Counter(finding.status for finding in report.findings)
    if not counts:
        return f"{counted(report.files, 'file')}: nothing found."
    parts = [
        f"{counts['removed']} removed",
        f"{counts['deprecated']} deprecated",
        f"{counts['habit']} to avoid",
    ]
    return f"{counted(report.files, 'file')}: {', '.join(parts)}."


def _line(group: Sequence[Finding]) -> str:
    """A reason's first place, and where else it applies."""
    finding = group[0]
    since = "" if finding.since == "XLA" else f" ({finding.since})"
    remark = f"; {finding.remark}" if finding.remark else ""
    words = f"{finding.effect}: {finding.old} -> {finding.new}{since}{remark}"
    return f"{finding.path}:{_place(finding)}:{finding.column}: {words}{_further(group[1:])}"


def _further(others: Sequence[Finding]) -> str:
    if not others:
        return ""
    named = ", ".join(dict.fromkeys(_place(finding) for finding in others[:_LINES_NAMED]))
    rest = len(others) - _LINES_NAMED
    more = f" and {rest} more" if rest > 0 else ""
    return f"; {len(others)} more: {named}{more}"


def _place(finding: Finding) -> str:
    cell = f"cell {finding.cell}, " if finding.cell is not None else ""
    return f"{cell}{finding.line}"
