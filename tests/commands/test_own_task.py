"""A user's own task, from training to predictions: docs/own_task.py through the command line."""

import csv
import shutil
import tomllib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from runs import TINY, VIRTUAL_TPU, metrics, on_torch_tpu, result, tpukit

from tpukit import cli

EXAMPLE = Path(__file__).parents[2] / "docs" / "own_task.py"
VALID = 20
"""Of each class: more than one batch, and a last one of which a second rank has no part."""
WAYS = {
    "cpu": (["--hw", "cpu"], {}),
    "xla-2": (["--hw", "tpu"], {**VIRTUAL_TPU, "CPU_NUM_DEVICES": "2"}),
    "two-ranks": (["--hw", "cpu", "--devices", "2"], {}),
    "torch-tpu": (["--hw", "tpu"], on_torch_tpu()),
}
MARKS = {
    "two-ranks": pytest.mark.slow,
    "xla-2": (pytest.mark.xla, pytest.mark.slow),
    "torch-tpu": pytest.mark.torch_tpu,
}


def write_photos(folder: Path) -> None:
    """Reddish and bluish noise."""
    rng = np.random.default_rng(0)
    for part, count in (("train", 32), ("valid", VALID)):
        for name, channel in (("red", 0), ("blue", 2)):
            (folder / part / name).mkdir(parents=True)
            for index in range(count):
                pixels = rng.integers(0, 120, (32, 32, 3), dtype=np.uint8)
                pixels[..., channel] += 100
                Image.fromarray(pixels).save(folder / part / name / f"{index}.png")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The task's file, its data, and a run in which it learned to tell the two classes apart."""
    folder = tmp_path_factory.mktemp("place")
    shutil.copy(EXAMPLE, folder / "my_task.py")
    write_photos(folder / "photos")
    summary = result(
        tpukit(
            "train", "--task", "my_task.py:Images", "--data-path", folder / "photos",
            "--hw", "cpu", "--max-steps", "8", "--set", "side=32", "--set", "model=resnet10t",
            "--results-dir", folder / "run", "--json", "--ckpt-every", "8", cwd=folder,
        )
    )  # fmt: skip
    assert summary["steps"] == 8
    assert metrics(folder / "run")[-1]["valid_accuracy"] == 1.0
    return folder


def failed(arguments, capsys) -> str:
    """What a command line that fails in this process prints."""
    assert cli.run([str(argument) for argument in arguments]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("way", [pytest.param(way, marks=MARKS.get(way, ())) for way in WAYS])
def test_it_is_evaluated_and_predicts(place, tmp_path, way):
    hardware, env = WAYS[way]
    base = ["--run", place / "run", *hardware, "--json"]
    fields = result(tpukit("test", *base, env=env, cwd=tmp_path))
    assert (fields["task"], fields["samples"]) == ("photos", 2 * VALID)
    assert fields["metrics"] == {"accuracy": 1.0}
    fields = result(tpukit("predict", *base, "--out", tmp_path / "out.csv", env=env, cwd=tmp_path))
    assert (fields["rows"], fields["path"]) == (2 * VALID, str(tmp_path / "out.csv"))
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["class"] for row in rows] == [Path(row["file"]).parent.name for row in rows]
    assert {row["class"] for row in rows} == {"red", "blue"}


def without_sum(config: str) -> str:
    """A run's config.toml without its first line, as runs of earlier versions have it."""
    return config.partition("\n")[2]


def test_a_file_that_moved_is_named_with_task(place, tmp_path, capsys):
    config = tomllib.loads((place / "run" / "config.toml").read_text())
    assert config["task"]["source"] == f"{place / 'my_task.py'}:Images"
    shutil.copytree(place / "run", tmp_path / "run")
    moved = tmp_path / "run" / "config.toml"
    gone = str(tmp_path / "gone.py")
    edited = moved.read_text().replace(str(place / "my_task.py"), gone)
    moved.write_text(edited)
    arguments = ["test", "--run", tmp_path / "run", "--hw", "cpu"]
    assert "not what the run wrote" in failed(arguments, capsys)
    moved.write_text(without_sum(edited))
    told = failed(arguments, capsys)
    assert gone in told and "--task FILE:CLASS" in told
    done = tpukit(*arguments, "--task", f"{place / 'my_task.py'}:Images", "--json")
    assert result(done)["metrics"] == {"accuracy": 1.0}


def test_its_submission_is_checked_against_a_sample(place, tmp_path, capsys):
    """docs/own_task.py reads nothing of `--sample-submission`."""
    out, sample = tmp_path / "out.csv", tmp_path / "sample.csv"
    base = ["predict", "--run", place / "run", "--hw", "cpu", "--out", out]
    ids = sorted(map(str, (place / "photos" / "valid").glob("*/*.png")))
    assert cli.run([str(argument) for argument in base]) == 0
    with out.open(newline="") as file:
        header, *rows = csv.reader(file)
    assert [row[0] for row in rows] == ids
    sample.write_text("".join(f"{name},x\n" for name in ("file", *ids[::-1])))
    # The sample's columns are the wrong ones at first.
    told = failed([*base, "--sample-submission", sample], capsys)
    assert "it lacks 1 column (x); it should not have 1 column (class)" in told
    sample.write_text(sample.read_text().replace("file,x", "file,class"))
    assert cli.run([str(argument) for argument in [*base, "--sample-submission", sample]]) == 0
    with out.open(newline="") as file:
        assert [*csv.reader(file)] == [header, *rows[::-1]]
    sample.write_text(sample.read_text().replace(ids[0], "7.png"))
    told = failed([*base, "--sample-submission", sample], capsys)
    assert f"it lacks 1 id (7.png); it should not have 1 id ({ids[0]})" in told


def test_a_run_that_does_not_record_its_file(place, tmp_path, capsys):
    shutil.copytree(place / "run", tmp_path / "run")
    config = tmp_path / "run" / "config.toml"
    lines = without_sum(config.read_text()).splitlines(keepends=True)
    config.write_text("".join(line for line in lines if not line.startswith("source = ")))
    arguments = ["predict", "--run", tmp_path / "run", "--hw", "cpu", "--out", tmp_path / "out.csv"]
    assert "--task FILE:CLASS" in failed(arguments, capsys)
    named = [*arguments, "--task", f"{place / 'my_task.py'}:Images"]
    assert cli.run([str(argument) for argument in named]) == 0
    assert (tmp_path / "out.csv").is_file()


def test_settings_of_the_task_come_with_set(place, capsys):
    told = failed(["test", "--run", place / "run", "--hw", "cpu", "--set", "classes=3"], capsys)
    assert "does not fit" in told and "(2," in told and "(3," in told
    told = failed(["test", "--run", place / "run", "--hw", "cpu", "--set", "clases=3"], capsys)
    assert "Did you mean classes?" in told


def test_another_task_than_the_runs_is_refused(place, capsys):
    told = failed(["test", "--run", place / "run", "--hw", "cpu", "--task", "eit"], capsys)
    assert "is a run of task 'photos', not 'eit'" in told


def test_a_task_without_an_evaluation_is_tested_by_its_validation_metrics(tmp_path, capsys):
    run = ["--task", TINY, "--hw", "cpu", "--results-dir", str(tmp_path / "run")]
    assert cli.run(["train", *run, "--max-steps", "1"]) == 0
    rows = metrics(tmp_path / "run")
    fields = result(tpukit("test", "--run", tmp_path / "run", "--hw", "cpu", "--json"))
    assert (fields["task"], fields["samples"]) == ("tiny", 10)
    for name, value in fields["metrics"].items():
        assert value == pytest.approx(rows[-1][f"valid_{name}"], rel=1e-5)
    limited = tpukit("test", "--run", tmp_path / "run", "--hw", "cpu", "--json", "--limit", "3")
    assert result(limited)["samples"] == 3
    capsys.readouterr()
    told = failed(["predict", "--run", tmp_path / "run", "--hw", "cpu"], capsys)
    assert "'tiny' has no `predict`" in told and "def predict" in told
