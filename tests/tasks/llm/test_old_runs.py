"""Runs that tpukit wrote with its own decoder, before its models were transformers'."""

import shutil
from pathlib import Path

import pytest
from runs import result, tpukit

RUNS = Path(__file__).with_name("old_runs")
ROWS = [[str(i), f"Ann and Bob came {word}. Who?", f"Bob came {word}"]
        for i, word in enumerate(("alone", "brief", "x"))]  # fmt: skip


@pytest.mark.parametrize(("name", "loss"), [
    # Its matrices are stored transposed by transformers.
    pytest.param("gpt2", 5.080043792724609, marks=pytest.mark.slow),
    ("qwen3", 5.573503621419271),  # with LoRA, which is merged
])  # fmt: skip
def test_an_old_run_has_the_loss_that_it_had(name, loss, write_csv, tmp_path):
    """The losses are those that the version which trained them told for these rows."""
    run = shutil.copytree(RUNS / name, tmp_path / "run")
    data = write_csv(tmp_path / "test.csv", ["id", "dialogue", "summary"], ROWS)
    told = result(tpukit("test", "--run", str(run), "--data", str(data), "--hw", "cpu", "--json"))
    assert told["metrics"]["loss"] == pytest.approx(loss, abs=1e-6)
