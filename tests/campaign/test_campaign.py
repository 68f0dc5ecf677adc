"""The campaign: a sample of each kind by default, all of it with `-m slow`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


def campaign(folder: Path, *options: object) -> subprocess.CompletedProcess[str]:
    paths = [str(TESTS.parent), str(TESTS), str(TESTS / "support")]
    return subprocess.run(
        [sys.executable, "-m", "campaign", "--folder", str(folder), *map(str, options)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "count"),
    [("fuzz", 26), ("damage", 20), pytest.param("kill", 3, marks=pytest.mark.slow)],
)
def test_a_sample(tmp_path, kind, count):
    done = campaign(tmp_path, "--only", kind, "--most", count)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert f"{kind}: {count} attacks, 0 failures" in done.stdout
    again = campaign(tmp_path, "--only", kind, "--most", count)
    assert again.stdout == done.stdout, "what was done is not repeated"
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == count


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_the_whole_campaign(tmp_path):
    folder = Path(os.environ.get("TPUKIT_CAMPAIGN", tmp_path))
    done = campaign(folder)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
