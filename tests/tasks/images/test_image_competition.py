"""An image competition from its folder to a submission: mixed sizes, grey, three damaged files."""

import csv
import json
import shutil
from collections import Counter

import numpy as np
import pytest
from competitions import SHARES, image_competition
from PIL import Image
from runs import TINY, failure, result, tpukit

from tpukit import api
from tpukit.errors import ConfigError
from tpukit.train.submission import Predictions, mean_of, neutral_row
from tpukit.train.target import Target

SIZES = ["--set", "model=test_convnext", "--set", "image_size=32", "--hw", "cpu"]


@pytest.fixture(scope="module")
def competition(tmp_path_factory):
    return image_competition(tmp_path_factory.mktemp("competition"), images=200)


def train(competition, run, *more):
    return tpukit(
        "train", "--task", "images", "--data-path", competition.folder, *SIZES, "--max-steps", "8",
        "--global-batch-size", "32", "--results-dir", run, "--json", *more,
    )  # fmt: skip


METRICS = ("macro_f1", "roc_auc", "quadratic_kappa")


@pytest.fixture(scope="module")
def trained(competition, tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "run"
    done = train(competition, run, "--set", "damaged=skip", "--set", "fold=3", "--metric",
                 ",".join(METRICS), "--set", "class_weights=balanced")  # fmt: skip
    assert "is not used" not in done.stderr
    assert result(done)["finished"]
    damaged = competition.damaged[0]
    assert f"1 of 160 images cannot be read: {damaged}.png in {competition.folder}" in done.stderr
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
    done = train(competition, tmp_path / "run")
    assert "column fold is not used" in done.stderr and "--set fold=0" in done.stderr
    told = failure(done)
    assert f"1 of 160 images cannot be read: {competition.damaged[0]}.png" in told
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
    with (competition.folder / "train.csv").open() as file:
        counts = Counter(row["label"] for row in csv.DictReader(file) if row["fold"] != "3")
    assert counts.total() == 128
    assert numbers(rows[damaged]) == pytest.approx(
        [counts[name] / 128 for name in rows[damaged]], abs=1e-7
    )
    # The other rows are those of a competition without that file.
    whole = tmp_path / "whole"
    shutil.copytree(competition.folder / "test_images", whole)
    (whole / f"{damaged}.png").unlink()
    others = predict(trained, tmp_path / "others.csv", "--data-path", whole,
                     "--set", "id_column=image_id", "--set", "probabilities=true")[0]  # fmt: skip
    assert len(others) == 39 and damaged not in others
    for name, row in others.items():
        assert numbers(row) == pytest.approx([float(rows[name][n]) for n in row], abs=1e-6)


def test_the_row_of_a_damaged_image_is_chosen(competition, trained, tmp_path):
    target = Target("class", ("label",), ("a", "b", "c"), counts=(1, 6, 3))
    for wanted, row in {
        "frequencies": [0.1, 0.6, 0.3],
        "uniform": [1 / 3] * 3,
        "c": [0, 0, 1],
    }.items():
        assert neutral_row(target, wanted).tolist() == pytest.approx(row)
    damaged = competition.damaged[2]
    labels = tmp_path / "labels.csv"
    labels.write_text("".join(f"{name},x\n" for name in ("image_id", *competition.answers)))
    sample = ("--sample-submission", labels)
    chosen = (*sample, "--set", "damaged_row=star")
    assert predict(trained, tmp_path / "b.csv", *chosen)[0][damaged] == {"x": "star"}
    told = failure(tpukit("predict", "--run", trained, "--hw", "cpu", "--out", "mine.parquet"))
    assert "predictions are written as CSV" in told and "--out mine.csv" in told
    told = failure(tpukit("predict", "--run", trained, "--hw", "cpu", "--set", "damaged_row=moon"))
    assert "damaged_row 'moon' is neither frequencies nor uniform nor a class (circle, " in told


def test_damaged_files_are_left_out_of_a_test(competition, trained, tmp_path):
    test = ("test", "--run", trained, "--hw", "cpu", "--out", tmp_path, "--json", "--data")
    done = tpukit(*test, "train.csv")
    found = result(done)
    assert found["samples"] == 158 and len(found["damaged"]) == 2
    assert "2 of 160 images cannot be read and are left out: " in done.stderr
    rows = list(csv.DictReader((tmp_path / "predictions.csv").open()))
    by_name = {row["file"].rpartition("/")[2][:-4]: row for row in rows}
    assert by_name.keys() == competition.labels.keys() - {*competition.damaged}
    assert all(row["label"] == competition.labels[name] for name, row in by_name.items())
    right = sum(row["label"] == row["predicted"] for row in rows)
    assert found["metrics"]["accuracy"] == right / 158
    assert (tmp_path / "mistakes.png").is_file()
    # Alone, each image has the prediction it has beside the damaged ones.
    whole = tmp_path / "whole"
    for name in sorted(by_name)[:10]:
        (whole / by_name[name]["label"]).mkdir(parents=True, exist_ok=True)
        shutil.copy(by_name[name]["file"], whole / by_name[name]["label"])
    alone = result(tpukit(*test, whole))
    assert alone["samples"] == 10 and alone["damaged"] == []
    for row in csv.DictReader((tmp_path / "predictions.csv").open()):
        before = by_name[row["file"].rpartition("/")[2][:-4]]
        assert row["predicted"] == before["predicted"]
        for name in SHARES:
            both = [float(found[f"predicted_{name}"]) for found in (row, before)]
            assert both[0] == pytest.approx(both[1], abs=1e-5)


def test_the_validation_is_that_of_a_test_without_the_damaged_files(competition, trained, tmp_path):
    last = json.loads((trained / "metrics.jsonl").read_text().splitlines()[-1])
    found = result(tpukit("test", "--run", trained, "--hw", "cpu", "--out", tmp_path, "--json"))
    rows = [*csv.DictReader((tmp_path / "predictions.csv").open())]
    names = {row["file"].rpartition("/")[2][:-4] for row in rows}
    with (competition.folder / "train.csv").open() as file:
        fold = {row["image_id"] for row in csv.DictReader(file) if row["fold"] == "3"}
    assert found["samples"] == 31 and names == fold - {*competition.damaged}
    for name in ("accuracy", "loss", *METRICS):
        assert found["metrics"][name] == pytest.approx(last[f"valid_{name}"], abs=1e-5)
    state = json.loads((trained / "checkpoints/step-00000008/state.json").read_text())
    assert state["best"]["macro_f1"] == last["valid_macro_f1"]


@pytest.mark.slow
def test_the_predictions_of_several_runs_are_averaged(competition, trained, tmp_path):
    other = tmp_path / "other"
    result(train(competition, other, "--set", "damaged=skip", "--set", "fold=1", "--lr", "0.01"))
    sample = ("--sample-submission", competition.sample)
    alone = [predict(run, tmp_path / "out.csv", *sample)[0] for run in (trained, other)]
    both, fields, told = predict(trained, tmp_path / "both.csv", "--run", other, *sample)
    assert fields["damaged"] == [competition.damaged[2]] and "The mean of 2 runs" in told
    assert alone[0] != alone[1]
    for name, row in both.items():
        if name not in fields["damaged"]:
            parts = [numbers(rows[name]) for rows in alone]
            means = [(a + b) / 2 for a, b in zip(*parts, strict=True)]
            assert numbers(row) == pytest.approx(means, abs=1e-6)
    out = tmp_path / "api.csv"
    api.predict([trained, other], out=out, sample_submission=sample[1], hw="cpu", log=print)
    assert out.read_bytes() == (tmp_path / "both.csv").read_bytes()
    with pytest.raises(ConfigError, match="the list is empty"):
        api.predict([], hw="cpu")


def test_only_runs_of_the_same_classes_are_averaged(competition, trained, tmp_path):
    parts = [Predictions(["a"], np.ones((1, 2)), Target("class", ("label",), names))
             for names in (("cat", "dog"), ("cat", "fox"))]  # fmt: skip
    with pytest.raises(ConfigError, match=r"one predicts 'fox' instead of 'dog'"):
        mean_of(parts)
    run = tmp_path / "run"
    result(tpukit("train", "--task", TINY, "--hw", "cpu", "--max-steps", "1", "--results-dir", run,
                  "--json"))  # fmt: skip
    told = failure(tpukit("predict", "--hw", "cpu", "--run", trained, "--run", run))
    assert "predictions of task 'images' are not averaged with those of 'tiny'" in told


def test_what_is_no_class_is_refused_before_training(tmp_path):
    for i in range(24):
        Image.new("L", (8, 8)).save(tmp_path / f"{i}.png")
    rows = [f"{i},{i // 2 % 2},{i % 3 // 2},{1 + i % 12}" for i in range(24)]
    (tmp_path / "train.csv").write_text("\n".join(["Id,Eyes,Face,Score", *rows]))
    run = tmp_path / "run"
    told = failure(tpukit("train", "--task", "images", "--data-path", tmp_path, *SIZES,
                          "--results-dir", run, "--set", "folder=."))  # fmt: skip
    assert "not clear: Eyes, Face, Score" in told and "--set columns=NAME" in told
    assert len(told.splitlines()) == 2


def test_a_sample_of_another_column_than_was_learned_is_refused(competition, trained, tmp_path):
    kept = trained / "checkpoints/step-00000008"
    kept = json.loads((kept / "target.json").read_text())
    assert (kept["columns"], kept["others"]) == (["label"], ["image_id", "fold", "patient"])
    sample = tmp_path / "sample.csv"
    sample.write_text(f"image_id,patient\n{next(iter(competition.answers))},0.5\n")
    told = failure(tpukit("predict", "--run", trained, "--hw", "cpu", "--sample-submission",
                          sample, "--out", tmp_path / "out.csv"))  # fmt: skip
    assert "sample.csv asks for patient; the run has learned label" in told
