"""A class's own `data_path` holds where none is given: in commands, in Python, in its run."""

import tomllib
from pathlib import Path

import numpy as np
import pytest
from runs import result, tpukit

import tpukit as package

TASK = """
from pathlib import Path
import numpy as np
from torch import nn
import tpukit

class Rows:
    def __init__(self, file):
        self.rows = np.load(file)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"x": self.rows[index]}

class Mean(tpukit.Task):
    defaults = tpukit.TrainingDefaults(global_batch_size=4, max_steps=1, lr=0.0)

    def __init__(self, data_path="photos", width=3):
        self.data_path, self.width = Path(data_path), width

    def build_model(self, ops):
        return nn.Linear(self.width, 1)

    def datasets(self):
        rows = Rows(self.data_path / "train.npy")
        return tpukit.Datasets(rows, rows)

    def loss(self, model, batch):
        return {"loss": model(batch["x"])[:, 0].square(), "mean": batch["x"].mean(1)}

class Wider(Mean):
    def __init__(self, depth=1, **settings):
        super().__init__(**settings)
"""
MEANS = {"photos": 1.0, "others": 2.0}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working directory with the data sets of `MEANS`; there is no `data`."""
    for name, mean in MEANS.items():
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "train.npy", np.full((8, 3), mean, np.float32))
    (tmp_path / "mean.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def recorded(run):
    return tomllib.loads((Path(run) / "config.toml").read_text())["train"]["data_path"]


@pytest.mark.parametrize(
    ("cls", "options", "used"),
    [
        ("Mean", [], "photos"),
        ("Wider", [], "photos"),
        ("Mean", ["--data-path", "others"], "others"),
    ],
)
def test_the_command_takes_it(place, cls, options, used):
    arguments = ["--task", f"mean.py:{cls}", "--hw", "cpu", "--results-dir", "run", "--json"]
    result(tpukit("train", *arguments, *options, cwd=place))
    assert recorded("run") == used
    tested = result(tpukit("test", "--run", "run", "--hw", "cpu", "--json", cwd=place))
    assert tested["metrics"]["mean"] == MEANS[used]


def test_a_batch_is_found_with_it(place):
    limits = ["--hw", "cpu", "--start", "2", "--max", "2", "--json"]
    found = result(tpukit("probe-batch", "--task", "mean.py:Mean", *limits, cwd=place))
    assert found["largest_batch_per_device"] == 2 and "--data-path" not in found["command"]


@pytest.mark.parametrize(
    ("arguments", "used"), [({}, "photos"), ({"data_path": "others"}, "others")]
)
def test_an_object_is_evaluated_on_the_data_that_it_was_trained_on(place, arguments, used):
    from tpukit.registry.classes import find_task

    task = find_task("mean.py:Mean")(**arguments)
    quiet = {"hw": "cpu", "log": lambda line: None}
    done = package.fit(task, results_dir="run", **quiet)
    assert Path(done) == Path("run") and recorded(done) == used
    assert package.evaluate(Path(done), **quiet)["metrics"]["mean"] == MEANS[used]
