"""Which task and which run a command is about where its line names neither."""

import json

import numpy as np
import pytest
from PIL import Image
from runs import failure, here, result, tpukit

STOPS = ("--set", "no_such=1")
"""Ends a training once its task is known."""


def images(folder, suffix=".png"):
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(folder / name / f"1{suffix}")


def image_table(folder):
    images(folder / "train_images", ".JPG")
    (folder / "train.csv").write_text("image,label\n1,cat\n")


def image_parts(folder):
    images(folder / "train")
    images(folder / "valid")


def prompts(folder):
    folder.mkdir()
    (folder / "train.csv").write_text("id;Dialogue;Summary\n1;a;b\n")


def texts(folder):
    folder.mkdir()
    (folder / "train.csv").write_text("id,Text,Label\n1,a,b\n")


def messages(folder):
    folder.mkdir()
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (folder / "train.jsonl").write_text(json.dumps({"messages": turns}) + "\n")


def samples(folder):
    (folder / "train").mkdir(parents=True)
    np.savez(folder / "train" / "1.npz", np.zeros(2))


def numbers(folder):
    folder.mkdir()
    (folder / "train.csv").write_text("age,fare\n1,2\n")


def nothing(folder):
    folder.mkdir()


def two(folder):
    image_table(folder)
    (folder / "train.csv").write_text("question,answer\na,b\n")


@pytest.mark.parametrize(
    ("write", "task", "reason"),
    [
        (images, "images", "place/cat/1.png"),
        (image_parts, "images", "place/train/cat/1.png"),
        (image_table, "images", "place/train_images/cat/1.JPG"),
        (prompts, "llm", "the columns dialogue, summary of place/train.csv"),
        (texts, "text", "the columns text, label of place/train.csv"),
        (messages, "llm", "the column messages of place/train.jsonl"),
        (samples, "eit", "place/train/1.npz"),
    ],
)
def test_the_data_names_the_task(write, task, reason, tmp_path):
    write(tmp_path / "place")
    done = here("train", "--data-path", "place", *STOPS, cwd=tmp_path)
    assert f"Task: {task}, by {reason} (--task chooses another)\n" in done.stdout
    assert f"Task {task!r} has no setting 'no_such'" in done.stderr
    named = here("train", "--data-path", "place", "--task", "eit", *STOPS, cwd=tmp_path)
    assert "Task: " not in named.stdout and "Task 'eit' has no setting" in named.stderr
    (tmp_path / "place").rename(tmp_path / "data")
    done = here("train", *STOPS, cwd=tmp_path)
    assert ("Task: " in done.stdout) == (task != "eit")
    assert f"Task {task!r} has no setting" in done.stderr


@pytest.mark.parametrize("write", [numbers, nothing, two])
def test_data_of_no_task_or_of_several(write, tmp_path):
    """Where no path is given, nothing is told of ./data."""
    write(tmp_path / "place")
    done = here("train", "--data-path", "place", *STOPS, cwd=tmp_path)
    assert done.returncode == 2
    if write is two:
        assert "place is data of images (by place/train_images/" in done.stderr
        assert "and llm (by the columns question, answer of" in done.stderr
    else:
        assert "--data-path place: the task is not clear from what it holds" in done.stderr
    assert "--task. eit: train/*.npz" in done.stderr and "images: CLASS/*.jpg" in done.stderr
    assert "llm: train.csv or train.jsonl of prompts" in done.stderr
    (tmp_path / "place").rename(tmp_path / "data")
    assert "Task 'eit' has no setting" in here("train", *STOPS, cwd=tmp_path).stderr


def test_a_file_names_the_task_too(tmp_path):
    prompts(tmp_path / "place")
    done = here("train", "--data-path", "place/train.csv", *STOPS, cwd=tmp_path)
    assert "Task: llm, by the columns dialogue, summary of place/train.csv" in done.stdout
    config = tmp_path / "own.toml"
    config.write_text("data_path = 'place'\n")
    assert "Task: llm" in here("train", "--config", config, *STOPS, cwd=tmp_path).stdout
    done = here("train", "--data-path", "nowhere", *STOPS, cwd=tmp_path)
    assert done.returncode == 2 and "There is no data at nowhere" in done.stderr
    assert "`tpukit data NAME --out nowhere` makes some: eit, images, dialogues" in done.stderr


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A working directory with images, and a run whose command names no task."""
    folder = tmp_path_factory.mktemp("work")
    result(tpukit("data", "images", "--out", "shapes", "--n", "80", "--side", "32", "--json",
                  cwd=folder))  # fmt: skip
    done = tpukit(
        "train", "--data-path", "shapes", "--model", "test_convnext", "--image-size", "32",
        "--hw", "cpu", "--max-steps", "1", "--global-batch-size", "16", "--accumulate", "1",
        "--json", cwd=folder,
    )  # fmt: skip
    assert result(done)["run"] == "results/images" and "Task: images, by shapes/" in done.stderr
    return folder


def test_the_one_run_is_tested_and_predicted(trained):
    (trained / "results" / "pictures").mkdir()
    for command in ("test", "predict"):
        done = tpukit(command, "--hw", "cpu", "--json", cwd=trained)
        assert result(done)["task"] == "images"
    found = here("test", "--hw", "cpu", "--task", "eit", cwd=trained)
    assert "Run folder results/deit does not exist" in found.stderr


def test_of_several_runs_one_is_named(trained, tmp_path):
    for name in ("results/images", "results/mine", "out-summarization", "results/mine.old-1"):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
        (tmp_path / name / "config.toml").write_text("[train]\n[task]\nname = 'images'\n")
    for command in ("test", "predict"):
        told = failure(here(command, "--hw", "cpu", cwd=tmp_path))
        assert "there are 3 runs here: " in told and "--run DIR" in told
        assert all(name in told for name in ("results/images", "results/mine", "out-summ"))
    (tmp_path / "none").mkdir()
    for command in ("test", "predict"):
        told = failure(here(command, "--hw", "cpu", cwd=tmp_path / "none"))
        assert "Run folder results/deit does not exist" in told


def test_a_search_looks_at_a_path_that_is_given(tmp_path):
    images(tmp_path / "data")
    for path, task in {"data": "images", None: "eit"}.items():
        given = () if path is None else ("--data-path", path)
        done = here("probe-batch", *given, *STOPS, cwd=tmp_path)
        assert f"Task {task!r} has no setting" in done.stderr
