"""Metrics in other libraries' runs."""

import json
import sys

import pytest
from fake_backend import FakeBackend
from tiny_task import Tiny

from tpukit.errors import ConfigError
from tpukit.train.config import TrainConfig, build
from tpukit.train.plan import TrainingRequest
from tpukit.train.run import train_run
from tpukit.train.run_folder import RunFolder
from tpukit.train.tracking import missing_tracker

LIBRARY = """
calls = []

def init(**given):
    calls.append(("init", given))
    return Run()

class Run:
    def log(self, values, step):
        calls.append(("log", step, values))
        if step > LAST:
            raise RuntimeError("no space left")

    def finish(self):
        calls.append(("finish",))
"""


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Trains with a stand-in for a library that is not installed here; its calls, the log."""
    monkeypatch.syspath_prepend(tmp_path)

    def run(last):
        (tmp_path / "trackio.py").write_text(f"LAST = {last}\n{LIBRARY}")
        monkeypatch.delitem(sys.modules, "trackio", raising=False)
        folder, lines = RunFolder(tmp_path / f"run{last}"), []
        settings = {"max_steps": 6, "global_batch_size": 16, "log_every": 2, "ckpt_every": 2,
                    "num_workers": 0, "track": "trackio"}  # fmt: skip
        train_run(
            TrainingRequest(Tiny(), TrainConfig(**settings), folder), FakeBackend(), lines.append
        )
        return sys.modules.pop("trackio").calls, lines, folder

    return run


def test_a_library_gets_each_line_of_the_metrics(train):
    calls, _, folder = train(99)
    (_, given), *logged, end = calls
    assert (given["project"], given["name"], end) == ("tiny", "run99", ("finish",))
    assert given["config"]["train"]["max_steps"] == 6
    rows = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert [step for _, step, _ in logged] == [row["step"] for row in rows]
    losses = [values["loss"] for *_, values in logged if "loss" in values]
    assert losses == [row["loss"] for row in rows if row["kind"] == "train"]


def test_a_library_that_fails_is_one_warning(train):
    calls, lines, _ = train(2)
    assert len([call for call in calls if call[0] == "log" and call[1] > 2]) == 1
    assert [line for line in lines if "the tracker failed: RuntimeError: no space left" in line]
    assert any(line.startswith("Done: 6 steps") for line in lines)


def test_a_library_that_is_not_installed_is_an_error(monkeypatch):
    assert missing_tracker("tensorboard") is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="the package wandb is not installed"):
        build(TrainConfig, {"track": "wandb"})
