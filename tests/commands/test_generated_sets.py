"""`tpukit data`: folders that hold one set each, sizes said first, and what to run next."""

import shlex

import pytest
from runs import result, tpukit

from tpukit.cli import run

KINDS = [("dialogues", 20), ("images", 80), ("reviews", 40), ("eit", 10)]


@pytest.mark.parametrize(("kind", "count"), KINDS)
def test_a_folder_holds_one_kind_of_set(kind, count, tmp_path, monkeypatch, capsys):
    """Without --out all kinds would write `data`, which is where training looks."""
    monkeypatch.chdir(tmp_path)
    if kind == "eit":
        (tmp_path / "data" / ".simulation").mkdir(parents=True)
    else:
        # The same command again is no mixing.
        assert [run(["data", kind, "--n", str(count)]) for _ in range(2)] == [0, 0]
    before = sorted(tmp_path.rglob("*"))
    for other in {name for name, _ in KINDS} - {kind}:
        assert run(["data", other]) == 2
        told = capsys.readouterr().err
        assert f"data holds a set of `data {kind}`" in told and f"--out data-{other}" in told
        assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
def test_eit_says_its_size_first_and_a_command_that_works_here(tmp_path):
    done = tpukit("data", "eit", "--n", 20, cwd=tmp_path)
    first, *_, last = done.stdout.splitlines()
    size = sum(path.stat().st_size for path in tmp_path.rglob("*.npz"))
    assert first.startswith("20 samples take about 1 MiB in data") and 0.9e6 < size < 1.5e6
    command = shlex.split(last.removeprefix("Train on them: "))
    assert command == ["tpukit", "train", "--data-path", "data"]
    more = ("--max-steps", 1, "--global-batch-size", 2, "--hw", "cpu", "--json")
    assert result(tpukit(*command[1:], *more, cwd=tmp_path))["steps"] == 1
