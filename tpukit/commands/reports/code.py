"""`tpukit doctor PATH...`: reports removed and deprecated calls in a user's code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tpukit.commands.output import Output
from tpukit.knowledge.calls import CallStatus
from tpukit.probe.lint import Finding, ScanReport, scan_paths

_LABELS: dict[CallStatus, str] = {
    "removed": "removed",
    "deprecated": "deprecated",
    "habit": "avoid",
}


def scan_code(paths: Sequence[str], output: Output, *, fix: bool, show: bool, strict: bool) -> int:
    """Scans, shows or applies the requested changes; returns the exit code."""
    changed = _rewrite(paths, output, write=fix) if show else []
    report = scan_paths(paths)
    for line in _report_lines(report):
        output.text(line)
    failing = [f for f in report.findings if f.status == "removed" or strict]
    output.result({
        "ok": not failing,
        "hardware": None,
        "versions": {},
        "checks": [],
        "findings": [finding.as_json() for finding in report.findings],
        "explanations": [],
        "changed": changed,
        "files": report.files,
        "notes": report.notes,
    })  # fmt: skip
    return 1 if failing else 0


def _rewrite(paths: Sequence[str], output: Output, *, write: bool) -> list[str]:
    """Prints the diffs; with `write` applies them and returns the changed files' paths."""
    from tpukit.probe.lint.fix import apply_fix, plan_fixes

    changed = []
    for fix in plan_fixes(paths):
        output.text(fix.diff)
        if write:
            backup = apply_fix(fix)
            kept = f"; backup: {backup}" if backup else ""
            output.text(f"{fix.path}: {fix.rewritten} places rewritten{kept}")
            changed.append(str(fix.path))
    return changed


def _report_lines(report: ScanReport) -> list[str]:
    lines = [_line(finding) for finding in report.findings]
    lines += [f"note: {note}" for note in report.notes]
    counts = Counter(finding.status for finding in report.findings)
    lines.append(
        f"{report.files} file{'s' * (report.files != 1)}: {counts['removed']} removed, "
        f"{counts['deprecated']} deprecated, {counts['habit']} to avoid."
    )
    if any(finding.fixable for finding in report.findings):
        lines.append(
            "`--diff` shows what `--fix` rewrites; `# tpukit: ignore` suppresses a line's findings."
        )
    return lines


def _line(finding: Finding) -> str:
    cell = f"cell {finding.cell}, " if finding.cell is not None else ""
    where = f"{finding.path}:{cell}{finding.line}:{finding.column}"
    since = "" if finding.status == "habit" else f" ({finding.since})"
    return f"{where}: {_LABELS[finding.status]}: {finding.old} -> {finding.new}{since}"
