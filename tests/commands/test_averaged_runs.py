"""`predict` with several runs: of a user's own task, and not of runs that were stopped."""

import pytest
from runs import failure, result, tpukit

import tpukit as tpukit_api

TASK = """
import os
import signal

import numpy as np
from torch import nn

from tpukit import Datasets, Predictions, Target, Task, TrainingDefaults, infer

print("imported")


class Line(Task):
    defaults = TrainingDefaults(global_batch_size=8, rows_per_device=8, lr=0.1)

    def __init__(self, stop=False):
        self.stop = stop

    def build_model(self, ops):
        return nn.Linear(1, 1)

    def datasets(self):
        rows = [{"x": np.full(1, i / 16, np.float32)} for i in range(16)]
        return Datasets(rows, rows[:8])

    def loss(self, model, batch):
        if self.stop and model.training:
            os.kill(os.getpid(), signal.SIGTERM)
        return {"loss": (model(batch["x"])[:, 0] - 3 * batch["x"][:, 0]).square()}

    def predict_rows(self, model, backend, request, log):
        rows = self.datasets().valid
        found = infer(self, rows, lambda b: model(b["x"]), backend)
        return Predictions([*map(str, range(8))], found, Target("number", ("y",)))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Two finished runs, and one that a signal stopped in its first step."""
    folder = tmp_path_factory.mktemp("averaged")
    (folder / "line.py").write_text(TASK)
    train = ("train", "--task", "line.py:Line", "--hw", "cpu", "--max-steps", "4", "--results-dir")
    for name, seed in {"a": 0, "b": 1}.items():
        done = tpukit(*train, name, "--json", "--set", f"global_seed={seed}", cwd=folder)
        assert result(done)["finished"]
    assert tpukit(*train, "c", "--set", "stop=true", cwd=folder).returncode == 143
    return folder


def predict(place, *runs, weights=()):
    words = [word for run in runs for word in ("--run", run)]
    return tpukit("predict", "--hw", "cpu", "--json", *words, *weights, cwd=place)


def mean(place, done):
    """The predictions that were written."""
    return [float(row[1]) for row in tpukit_api.read_table(place / result(done)["path"]).rows]


def test_runs_of_a_users_task_are_averaged(place):
    done = predict(place, "a", "b")
    both = mean(place, done)
    assert done.stderr.count("imported") == 1
    alone = [mean(place, predict(place, run)) for run in ("a", "b")]
    assert alone[0] != alone[1]
    assert both == pytest.approx([(a + b) / 2 for a, b in zip(*alone, strict=True)], abs=1e-6)
    blend = mean(place, predict(place, "a", "b", weights=("--weights", "3,1")))
    wanted = [(3 * a + b) / 4 for a, b in zip(*alone, strict=True)]
    assert blend == pytest.approx(wanted, abs=1e-6)
    told = failure(predict(place, "a", "b", weights=("--weights", "3")))
    assert "--weights 3: expected 2 numbers" in told
    runs = [tpukit_api.load(place / run, log=print) for run in ("a", "b")]
    out = place / "api.csv"
    tpukit_api.predict(runs, hw="cpu", out=out, log=print)
    assert [float(row[1]) for row in tpukit_api.read_table(out).rows] == pytest.approx(both)


def test_a_run_that_was_stopped_is_averaged_where_its_checkpoint_is_named(place):
    told = failure(predict(place, "a", "c"))
    assert "the run in c is not finished (step 1 of 4, never validated)" in told
    assert "--run c/checkpoints/step-00000001" in told
    both = mean(place, predict(place, "a", "c/checkpoints/step-00000001"))
    done = predict(place, "c")
    assert "Warning: the run in c is not finished (step 1 of 4, never" in done.stderr
    alone = [mean(place, done), mean(place, predict(place, "a"))]
    assert both == pytest.approx([(a + b) / 2 for a, b in zip(*alone, strict=True)], abs=1e-6)
