"""The campaign of scripts/campaign: a sample of each kind. All of it takes hours."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from runs import ROOT, SUPPORT


def campaign(folder, *options):
    paths = map(str, (ROOT, ROOT / "scripts", SUPPORT))
    return subprocess.run(
        [sys.executable, "-m", "campaign", "--folder", str(folder), *map(str, options)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "count"),
    [("fuzz", 13), ("damage", 10), pytest.param("kill", 3, marks=pytest.mark.slow)],
)
def test_a_sample(tmp_path, kind, count):
    done = campaign(tmp_path, "--only", kind, "--most", count)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert f"{kind}: {count} attacks, 0 failures" in done.stdout
    again = campaign(tmp_path, "--only", kind, "--most", count)
    assert again.stdout == done.stdout, "what was done is not repeated"
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == count
