"""`predict` with several runs: of a user's own task, and not of runs that were stopped."""

import pytest
from runs import failure, result, tpukit

import tpukit as tpukit_api

TASK = """
import os
import signal

import numpy as np
from torch import nn

from tpukit import Datasets, Task, TrainingDefaults, infer

print("imported")


class Line(Task):
    averages_runs = True
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

    def predict(self, model, backend, request, log):
        models = [model, *(other.model_on(backend) for other in request.averaged)]
        rows = self.datasets().valid
        found = [infer(self, rows, lambda b: m(b["x"]), backend)[:, 0] for m in models]
        return {"mean": np.mean(found, 0).tolist()}
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


def predict(place, *runs):
    words = [word for run in runs for word in ("--run", run)]
    return tpukit("predict", "--hw", "cpu", "--json", *words, cwd=place)


def test_runs_of_a_users_task_are_averaged(place):
    done = predict(place, "a", "b")
    both = result(done)["mean"]
    assert done.stderr.count("imported") == 1
    alone = [result(predict(place, run))["mean"] for run in ("a", "b")]
    assert alone[0] != alone[1]
    assert both == pytest.approx([(a + b) / 2 for a, b in zip(*alone, strict=True)], abs=1e-6)
    runs = [tpukit_api.load(place / run, log=print) for run in ("a", "b")]
    assert tpukit_api.predict(runs, hw="cpu", log=print)["mean"] == pytest.approx(both)


def test_a_run_that_was_stopped_is_averaged_where_its_checkpoint_is_named(place):
    told = failure(predict(place, "a", "c"))
    assert "the run in c is not finished (step 1 of 4, never validated)" in told
    assert "--run c/checkpoints/step-00000001" in told
    both = result(predict(place, "a", "c/checkpoints/step-00000001"))["mean"]
    done = predict(place, "c")
    assert "Warning: the run in c is not finished (step 1 of 4, never" in done.stderr
    alone = [result(predict(place, "a"))["mean"], result(done)["mean"]]
    assert both == pytest.approx([(a + b) / 2 for a, b in zip(*alone, strict=True)], abs=1e-6)
