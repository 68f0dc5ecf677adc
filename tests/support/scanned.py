"""Scans code as `doctor PATH` does."""

from tpukit.probe.lint.finding import Finding
from tpukit.probe.lint.prefilter import may_concern
from tpukit.probe.lint.scan import module_findings
from tpukit.probe.lint.source import python_module


def findings(code: str, moves: str = "") -> list[Finding]:
    """What is found also gets past the look that saves parsing most files."""
    module = python_module("a.py", f"{code}\n")
    assert module.tree is not None, module.notes
    found = module_findings(module, moves=moves)
    assert not found or may_concern(code.encode(), moves=moves)
    return found


def ids(code: str, moves: str = "") -> list[str]:
    return [finding.id for finding in findings(code, moves)]
