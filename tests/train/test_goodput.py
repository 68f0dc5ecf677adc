"""The share of a run's time that made steps which it kept."""

import json

import pytest
from fake_backend import FakeBackend
from tiny_task import Tiny

from tpukit.train.clocks import Goodput
from tpukit.train.config import TrainConfig
from tpukit.train.plan import TrainingRequest
from tpukit.train.run import train_run
from tpukit.train.run_folder import RunFolder
from tpukit.train.run_log import read_metrics


def test_lost_steps_count_as_time_alone(monkeypatch):
    """Ten seconds of steps are kept, ten were made after the checkpoint at step 20."""
    rows = [
        {"step": step, "step_seconds": 5.0, "elapsed_seconds": 7.0 * number}
        for number, step in enumerate((10, 20, 30, 40), 1)
    ]
    now = 1000.0
    monkeypatch.setattr("tpukit.train.clocks.time.monotonic", lambda: now)
    goodput = Goodput.after(rows, 20, began=990.0)
    assert goodput.elapsed_seconds == 28 + 10
    assert goodput.fields(8.0)["goodput"] == pytest.approx((10 + 8) / 38)


def test_a_run_says_its_goodput_over_its_sessions(tmp_path):
    """Lines of steps that a killed session made after its checkpoint are in the time, once."""
    folder = RunFolder(tmp_path / "run")

    def session(steps):
        config = TrainConfig(max_steps=steps, global_batch_size=16, log_every=2, ckpt_every=4,
                             num_workers=0, schedule="constant")  # fmt: skip
        train_run(TrainingRequest(Tiny(), config, folder), FakeBackend(), lambda _: None)
        return [row for row in read_metrics(folder) if row["kind"] == "train"]

    before = session(4)
    lost = {"kind": "train", "step": 6, "loss": 1.0, "step_seconds": 50.0, "elapsed_seconds": 1e3}
    with folder.metrics.open("a") as file:
        file.write(json.dumps(lost) + "\n")
    last = session(8)[-1]
    assert last["elapsed_seconds"] > 1e3
    kept = sum(row["step_seconds"] for row in session(8))
    assert last["goodput"] == pytest.approx(kept / last["elapsed_seconds"], rel=0.01)
    assert 0 < kept < 50 and before[-1]["goodput"] <= 1
    assert "Goodput: " in folder.log.read_text()
    assert "Goodput" in folder.report.read_text()
