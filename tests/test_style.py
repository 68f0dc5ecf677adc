"""Linter, formatter, strict types and the import contract: the commands that people run too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
CHECKS = {
    "lint": ["ruff", "check", "."],
    "format": ["ruff", "format", "--check", "."],
    "types": ["mypy"],
    "imports": ["lint-imports"],
}


@pytest.mark.parametrize("command", CHECKS.values(), ids=CHECKS)
def test_check_passes(command):
    tool = BIN / command[0]
    done = subprocess.run(
        [tool, *command[1:]], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_benchmarks_call_functions_as_they_are():
    """They run for hours and seldom: a changed signature should not end one at its last step."""
    done = subprocess.run(
        [BIN / "mypy", *sorted(ROOT.glob("benchmarks/*.py"))], cwd=ROOT,
        env={**os.environ, "MYPYPATH": f"benchmarks:{os.environ.get('PYTHONPATH', '.')}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "Found" in done.stdout or done.returncode == 0, done.stdout + done.stderr
    assert not [line for line in done.stdout.splitlines() if line.endswith("[call-arg]")]
