"""A task whose file imports the modules beside it, and one named as a module of a package."""

import tomllib

import pytest
from runs import parameters, result, tpukit

import tpukit as package
from tpukit.errors import ConfigError

LENGTHS = """
LENGTH = {length}

def cut(x):
    return x[:LENGTH]
"""
TASK = """
import numpy as np
from torch import nn
import tpukit
from tpukit.train.evaluation import infer
from {place}lengths import LENGTH, cut

class Rows:
    def __len__(self):
        return 24

    def __getitem__(self, index):
        from {place}targets import target  # found in a worker as well
        x = cut(np.random.default_rng(index).standard_normal(12, dtype=np.float32))
        return {{"x": x, "y": target(x)}}

class Cut(tpukit.Task):
    defaults = tpukit.TrainingDefaults(global_batch_size=8, max_steps=3)

    def build_model(self, ops):
        return nn.Linear(LENGTH, 1)

    def datasets(self):
        return tpukit.Datasets(Rows(), Rows())

    def loss(self, model, batch):
        return {{"loss": (model(batch["x"])[:, 0] - batch["y"]).square()}}

    def predict(self, model, backend, request, log):
        out = infer(self, Rows(), lambda batch: model(batch["x"]), backend)
        return {{"rows": len(out), "sum": float(out.sum())}}
"""
TARGETS = "def target(x):\n    return x.sum()\n"
UNRELATED = "raise RuntimeError('nobody meant this file')\n"
"""A file `statistics.py`, a name that libraries import from the standard library during a run."""
NEW_PROCESS = {"PYTHONHASHSEED": "0"}
"""A variable that no fork of a warm process can have."""


def write(folder, length=4, place=""):
    folder.mkdir(parents=True)
    (folder / "bert.py").write_text(TASK.format(place=place))
    (folder / "lengths.py").write_text(LENGTHS.format(length=length))
    (folder / "targets.py").write_text(TARGETS)
    (folder / "statistics.py").write_text(UNRELATED)
    return f"{folder / 'bert.py'}:Cut"


def train(spec, run, *more, cwd, env=None):
    arguments = ["--task", spec, "--hw", "cpu", "--results-dir", run, "--json", *more]
    return result(tpukit("train", *arguments, cwd=cwd, env=env))


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """The task's folder, and a run of the same task in a single file beside nothing."""
    folder = tmp_path_factory.mktemp("project")
    write(folder / "task")
    alone = folder / "alone"
    alone.mkdir()
    single = TASK.replace("from {place}lengths import LENGTH, cut", LENGTHS)
    single = single.replace("from {place}targets import target", "target = np.sum")
    (alone / "bert.py").write_text(single.format(length=4))
    train(f"{alone / 'bert.py'}:Cut", folder / "single", cwd=folder)
    return folder


def same_weights(run, project):
    ours, theirs = parameters(run), parameters(project / "single")
    return all(ours[name].allclose(theirs[name], rtol=1e-5) for name in theirs)


@pytest.mark.slow
def test_two_ranks_import_them(project, tmp_path):
    more = ["--devices", 2, "--num-workers", 2]
    train(project / "task/bert.py:Cut", tmp_path / "run", *more, cwd=tmp_path)
    assert same_weights(tmp_path / "run", project)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["file", "module"])
def test_trained_tested_predicted_and_probed(project, tmp_path, way):
    """A file of one's own, and a module of a package that imports its own by relative names."""
    spec, cwd = project / "task/bert.py:Cut", tmp_path
    if way == "module":
        cwd = tmp_path / "work"
        write(cwd / "models", place=".")
        spec = "models.bert:Cut"
    run = tmp_path / "run"
    train(spec, run, "--num-workers", 2, cwd=cwd, env=NEW_PROCESS)
    assert same_weights(run, project)
    # From another folder.
    base = ["--run", run, "--hw", "cpu", "--json"]
    expected = ["--run", project / "single", "--hw", "cpu", "--json"]
    for command, field in (("test", "metrics"), ("predict", "sum")):
        ours, theirs = (result(tpukit(command, *a, cwd=project))[field] for a in (base, expected))
        assert ours == pytest.approx(theirs, rel=1e-5)
    limits = ["--hw", "cpu", "--start", "2", "--max", "2", "--json"]
    found = result(tpukit("probe-batch", "--task", spec, *limits, cwd=cwd))
    assert found["largest_batch_per_device"] == 2


@pytest.mark.slow
def test_from_python_two_files_have_neighbours_of_one_name(tmp_path):
    runs = {}
    for length in (4, 6, 4):
        spec = f"{tmp_path / str(length) / 'bert.py'}:Cut"
        if not (tmp_path / str(length)).is_dir():
            write(tmp_path / str(length), length)
        run = tmp_path / f"run-{len(runs)}"
        runs[run] = package.fit(spec, hw="cpu", results_dir=run, log=lambda line: None)
        assert parameters(run)["weight"].shape == (1, length)
    for run, length in zip(runs, (4, 6, 4), strict=True):
        assert package.load(run).model.in_features == length
        assert package.predict(run, hw="cpu")["rows"] == 24


def test_a_class_of_a_package_records_where_it_is_imported_from(tmp_path):
    write(tmp_path / "deep/models/text", place=".")
    train("models.text.bert:Cut", tmp_path / "run", cwd=tmp_path / "deep")
    tested = tpukit("test", "--run", tmp_path / "run", "--hw", "cpu", "--json", cwd=tmp_path)
    assert result(tested)["samples"] == 24
    config = tomllib.loads((tmp_path / "run/config.toml").read_text())
    assert config["task"]["source"] == f"{tmp_path / 'deep'}:models.text.bert:Cut"


def test_what_cannot_be_imported_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "models", place=".")
    with pytest.raises(ConfigError, match=r"no_models.bert cannot be imported: ModuleNotFound"):
        package.fit("no_models.bert:Cut", hw="cpu")
    with pytest.raises(ConfigError, match=r"--task PACKAGE.MODULE:CLASS"):
        package.fit("models/bert.py:Cut", hw="cpu")
    with pytest.raises(ConfigError, match=r"models.bert has no task class 'Cat'.\nIt has Cut."):
        package.fit("models.bert:Cat", hw="cpu")
