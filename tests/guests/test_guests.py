"""Two tasks outside of the package, installed by entry points: the rights of our own tasks."""

import re
import shutil
import tomllib
from pathlib import Path

import numpy as np
import pytest
from runs import failure, result, tpukit

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The environment in which both packages are installed, and a folder with their data."""
    place = tmp_path_factory.mktemp("site")
    for project in (HERE / "spirals", HERE / "letters"):
        described = tomllib.loads((project / "pyproject.toml").read_text())["project"]
        name, version = described["name"], described["version"]
        shutil.copytree(project / name, place / name)
        metadata = place / f"{name}-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        points = described["entry-points"]["tpukit.tasks"].items()
        lines = ["[tpukit.tasks]", *(f"{task} = {target}" for task, target in points)]
        (metadata / "entry_points.txt").write_text("\n".join(lines))
    folder = tmp_path_factory.mktemp("work")
    (folder / "book.txt").write_text("the cat sat on the mat and the dog sat on the cat. " * 8)
    return {"env": {"PYTHONPATH": f"{place}:{HERE.parents[1]}", "COLUMNS": "120"}, "cwd": folder}


CPU = ("--hw", "cpu", "--json")


@pytest.fixture(scope="module")
def spirals(installed):
    made = result(tpukit("data", "spiral-points", "--n", 120, "--turns", 2, "--json", **installed))
    assert made == {"path": "data", "points": 120}
    line = ("train", "--task", "spirals", "--preset", "quick", "--target", "point", *CPU)
    trained = result(tpukit(*line, **installed))
    assert (trained["steps"], trained["run"]) == (4, "spirals-run")
    return installed


@pytest.fixture(scope="module")
def letters(installed):
    line = ("train", "--task", "letters", "--data-path", "book.txt", "--width", 12, "--context", 8)
    trained = result(tpukit(*line, *CPU, **installed))
    assert (trained["steps"], trained["run"]) == (10, "results/letters")
    return installed


@pytest.mark.parametrize(
    ("line", "shown", "others"),
    [
        ("train --task spirals", r"--target +noise\|point +What the network", "--size"),
        ("probe-batch --task spirals", r"--noise-levels .*Noise levels of the diffusion", "--size"),
        ("test --task spirals", r"--ancestral .*Add noise in each", "--sampling-steps"),
        ("predict --task spirals", r"--file-type +npy\|csv", "--num-beams"),
        ("train --task letters", r"--context .*\(default: 16\)", "--size"),
        ("probe-batch --task letters", r"--width .*\(default: 32\)", "--size"),
        ("test --task letters", r"--in-bits .*Give the loss in bits", "--samples"),
        ("predict --task letters", r"--prompt .*Text to go on from", "--num-beams"),
        ("data", r"spiral-points +Generate points on a spiral", "letters"),
        ("", r"eit, images, letters, llm, spirals", "--size"),
    ],
)
def test_help_lists_their_options_without_importing_them(line, shown, others, installed, tmp_path):
    blocked = tmp_path / "torch"
    blocked.mkdir()
    (blocked / "__init__.py").write_text("raise SystemExit('torch was imported')")
    path = f"{tmp_path}:{installed['env']['PYTHONPATH']}"
    variables = {**installed["env"], "PYTHONPATH": path}
    done = tpukit(*line.split(), "--help", env=variables, cwd=installed["cwd"])
    assert done.returncode == 0, done.stderr
    assert re.search(shown, done.stdout), done.stdout
    assert others not in done.stdout


def test_a_diffusion_task_of_another_package(spirals):
    assert 'target = "point"' in (spirals["cwd"] / "spirals-run" / "config.toml").read_text()
    run = ("--run", "spirals-run", *CPU)
    tested = result(tpukit("test", "--draws", 30, "--ancestral", "--limit", 50, *run, **spirals))
    assert (tested["samples"], tested["ancestral"]) == (30, True)
    assert (spirals["cwd"] / tested["picture"]).is_file()
    drawn = result(tpukit("predict", "--draws", 7, "--file-type", "csv", *run, **spirals))
    assert drawn["path"] == "points.csv"
    assert np.loadtxt(spirals["cwd"] / "points.csv", delimiter=",").shape == (7, 2)


def test_a_text_task_of_another_package(letters):
    run = ("--run", "results/letters", *CPU)
    nats = result(tpukit("test", "--limit", 8, *run, **letters))["metrics"]["loss"]
    bits = result(tpukit("test", "--limit", 8, "--in-bits", *run, **letters))["metrics"]["loss"]
    assert bits == pytest.approx(nats / np.log(2))
    line = ("--prompt", "a cat", "--length", 6, "--temperature", 0)
    result(tpukit("predict", *line, *run, **letters))
    text = (letters["cwd"] / "text.txt").read_text()
    assert text.startswith("a cat") and len(text) == 11


def test_their_batch_is_sized_with_their_options(spirals):
    line = ("probe-batch", "--task", "spirals", "--noise-levels", 9, "--max", 4, *CPU)
    sized = result(tpukit(*line, **spirals))
    assert sized["task"] == "spirals" and "--task spirals --set noise_levels=9" in sized["command"]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("test --run spirals-run --sampling-steps 5", "Task eit has one: give a run of it."),
        ("predict --run spirals-run --num-beams 5", "Task llm has one"),
        ("train --task spirals --target points", "Did you mean point?"),
        ("train --task eit --noise-levels 5", "For spirals: tpukit train --task spirals"),
        ("train --task spiral", "Did you mean spirals?"),
    ],
)
def test_options_of_other_tasks_are_errors_of_two_lines(line, told, spirals):
    assert told in " ".join(failure(tpukit(*line.split(), **spirals)).split())
