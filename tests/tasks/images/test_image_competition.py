"""An image competition from its folder to a submission: mixed sizes, grey, three damaged files."""

from __future__ import annotations

import csv
import shutil
from collections import Counter

import pytest
from competitions import image_competition
from runs import failure, result, tpukit

from tpukit.tasks.images.data.listing import find_training_images
from tpukit.tasks.images.evaluation.prediction import neutral_row
from tpukit.tasks.images.images_config import ImagesConfig
from tpukit.tasks.images.task import ImagesTask

SIZES = ["--set", "model=test_convnext", "--set", "image_size=32", "--hw", "cpu"]


@pytest.fixture(scope="module")
def competition(tmp_path_factory):
    return image_competition(tmp_path_factory.mktemp("competition"))


def train(competition, run, *more):
    return tpukit(
        "train", "--task", "images", "--data-path", competition.folder, *SIZES, "--max-steps", "8",
        "--global-batch-size", "32", "--results-dir", run, "--json", *more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def trained(competition, tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "run"
    done = train(competition, run, "--set", "damaged=skip")
    assert result(done)["finished"]
    damaged = competition.damaged[0]
    assert f"1 of 400 images cannot be read: {damaged}.png in {competition.folder}" in done.stderr
    return run


def predict(run, out, *more):
    """The rows by id, and what was printed."""
    done = tpukit("predict", "--run", run, "--hw", "cpu", "--out", out, "--json", *more)
    with out.open() as file:
        rows = {row.pop("image_id"): row for row in csv.DictReader(file)}
    return rows, result(done), done.stderr


def numbers(row):
    return [float(value) for value in row.values()]


def test_damaged_files_are_an_error_with_a_way_on(competition, trained, tmp_path):
    told = failure(train(competition, tmp_path / "run"))
    assert f"1 of 400 images cannot be read: {competition.damaged[0]}.png" in told
    assert "--set damaged=skip" in told
    told = failure(tpukit("predict", "--run", trained, "--hw", "cpu", "--set", "damaged=stop",
                          "--out", tmp_path / "out.csv"))  # fmt: skip
    assert f"{competition.damaged[2]}.png: not an image that can be read" in told


def test_a_damaged_test_image_gets_the_training_classes_frequencies(competition, trained, tmp_path):
    damaged = competition.damaged[2]
    sample = ("--sample-submission", competition.sample)
    rows, fields, told = predict(trained, tmp_path / "out.csv", *sample)
    assert [*rows] == [*competition.answers]
    assert fields["damaged"] == [damaged] and f"(damaged_row: frequencies): {damaged}" in told
    used = find_training_images(ImagesConfig(data_path=str(competition.folder)))[0].files
    counts = Counter(competition.labels[file.rpartition("/")[2][:-4]] for file in used)
    assert numbers(rows[damaged]) == pytest.approx(
        [counts[name] / len(used) for name in rows[damaged]], abs=1e-7
    )
    # The other rows are those of a competition without that file.
    whole = tmp_path / "whole"
    shutil.copytree(competition.folder / "test_images", whole)
    (whole / f"{damaged}.png").unlink()
    others = predict(trained, tmp_path / "others.csv", "--data-path", whole,
                     "--set", "id_column=image_id", "--set", "probabilities=true")[0]  # fmt: skip
    assert len(others) == 99 and damaged not in others
    for name, row in others.items():
        assert numbers(row) == pytest.approx([float(rows[name][n]) for n in row], abs=1e-6)


def test_the_row_of_a_damaged_image_is_chosen(competition, trained, tmp_path):
    counts = {"class_names": ("a", "b", "c"), "class_counts": (1, 6, 3)}
    for wanted, row in {
        "frequencies": [0.1, 0.6, 0.3],
        "uniform": [1 / 3] * 3,
        "c": [0, 0, 1],
    }.items():
        neutral, best = neutral_row(ImagesTask(damaged_row=wanted, **counts))
        assert neutral.tolist() == pytest.approx(row) and best == (2 if wanted == "c" else 1)
    damaged = competition.damaged[2]
    labels = tmp_path / "labels.csv"
    labels.write_text("".join(f"{name},x\n" for name in ("image_id", *competition.answers)))
    sample = ("--sample-submission", labels)
    chosen = (*sample, "--set", "damaged_row=star")
    assert predict(trained, tmp_path / "b.csv", *chosen)[0][damaged] == {"x": "star"}
    told = failure(tpukit("predict", "--run", trained, "--hw", "cpu", "--set", "damaged_row=moon"))
    assert "damaged_row 'moon' is neither frequencies nor uniform nor a class (circle, " in told


def test_damaged_files_are_left_out_of_a_test(competition, trained, tmp_path):
    test = ("test", "--run", trained, "--hw", "cpu", "--out", tmp_path, "--json", "--data")
    done = tpukit(*test, "train.csv")
    found = result(done)
    assert found["samples"] == 398 and len(found["damaged"]) == 2
    assert "2 of 400 images cannot be read and are left out: " in done.stderr
    rows = list(csv.DictReader((tmp_path / "predictions.csv").open()))
    by_name = {row["file"].rpartition("/")[2][:-4]: row for row in rows}
    assert by_name.keys() == competition.labels.keys() - {*competition.damaged}
    assert all(row["label"] == competition.labels[name] for name, row in by_name.items())
    right = sum(row["label"] == row["predicted"] for row in rows)
    assert found["metrics"]["accuracy"] == right / 398
    assert (tmp_path / "mistakes.png").is_file()
    # Alone, each image has the prediction it has beside the damaged ones.
    whole = tmp_path / "whole"
    for name in sorted(by_name)[:20]:
        (whole / by_name[name]["label"]).mkdir(parents=True, exist_ok=True)
        shutil.copy(by_name[name]["file"], whole / by_name[name]["label"])
    alone = result(tpukit(*test, whole))
    assert alone["samples"] == 20 and alone["damaged"] == []
    for row in csv.DictReader((tmp_path / "predictions.csv").open()):
        before = by_name[row["file"].rpartition("/")[2][:-4]]
        assert row["predicted"] == before["predicted"]
        assert float(row["probability"]) == pytest.approx(float(before["probability"]), abs=1e-5)
