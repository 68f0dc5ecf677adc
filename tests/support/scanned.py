"""Scans code as `doctor PATH` does."""

from tpukit.probe.lint.finding import Finding
from tpukit.probe.lint.scan import may_concern, module_findings
from tpukit.probe.lint.source import python_module


def findings(code: str, moves: str = "") -> list[Finding]:
    """What is found in a file of a folder."""
    module = python_module("a.py", f"{code}\n")
    assert module.tree is not None, module.notes
    found = module_findings(module, moves=moves)
    assert not found or may_concern("a.py", code.encode(), moves=moves)
    return found


def ids(code: str, moves: str = "") -> list[str]:
    return [finding.id for finding in findings(code, moves)]
