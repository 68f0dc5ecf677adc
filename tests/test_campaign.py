"""The campaign of scripts/campaign: a sample of each kind. All of it takes hours."""

import os

import pytest
from runs import ROOT, SUPPORT, script

SCRIPTS = ROOT / "scripts"


def campaign(folder, *options):
    paths = {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, SCRIPTS, SUPPORT)))}
    return script(SCRIPTS / "campaign/__main__.py", "--folder", folder, *options, env=paths)


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        pytest.param("fuzz", 13, marks=pytest.mark.slow),
        ("damage", 10),
        pytest.param("kill", 3, marks=pytest.mark.slow),
    ],
)
def test_a_sample(tmp_path, kind, count):
    done = campaign(tmp_path, "--only", kind, "--most", count)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert f"{kind}: {count} attacks, 0 failures" in done.stdout
    again = campaign(tmp_path, "--only", kind, "--most", count)
    assert again.stdout == done.stdout, "what was done is not repeated"
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == count
