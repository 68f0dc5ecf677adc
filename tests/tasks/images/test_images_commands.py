"""The images task from the command line, on every kind of hardware that is here."""

import csv
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from runs import (
    VIRTUAL_TPU,
    failure,
    parameters,
    relative_difference,
    result,
    same_bytes,
    tpukit,
)

import tpukit as tpukit_api
from tpukit.errors import DataError
from tpukit.io.tables import read_table
from tpukit.train.submission import Predictions, write_submission
from tpukit.train.target import Target

SIZES = ["--set", "model=test_convnext", "--set", "image_size=32", "--set", "mixup=0.8",
         "--set", "cutmix=1.0", "--set", "layer_decay=0.9",
         # Adam divides by its own gradients: a bias that starts at 0 would follow their rounding.
         "--set", "optimizer=sgd", "--lr", "0.05"]  # fmt: skip
SECOND = ["0.75", "0.125"]
"""What `test_a_sample_of_one_column_has_what_its_values_are` predicts for the second class."""
XLA = {**VIRTUAL_TPU, "CPU_NUM_DEVICES": "2"}


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shapes")
    made = result(tpukit("data", "images", "--out", folder, "--n", "160", "--side", "32", "--json"))
    assert (made["train"], made["valid"], made["test"], made["classes"]) == (128, 16, 16, 8)
    return folder


def train(data, run, *more, steps=6, env=None):
    return tpukit(
        "train", "--task", "images", "--data-path", data, *SIZES, "--global-batch-size", "16",
        "--set", "warmup_steps=0", "--set", "schedule=constant", "--set", "ema_decay=0.9",
        "--max-steps", str(steps), "--ckpt-every", "3", "--results-dir", run, "--json", *more,
        env=env,
    )  # fmt: skip


@pytest.fixture(scope="module")
def trained(shapes, tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "cpu"
    done = result(train(shapes, run, "--hw", "cpu", "--accumulate", "1"))
    assert done["finished"]
    return run


def test_accumulation_gives_the_same_weights(shapes, trained, tmp_path):
    result(train(shapes, tmp_path / "run", "--hw", "cpu", "--accumulate", "4"))
    assert relative_difference(parameters(tmp_path / "run"), parameters(trained)) < 1e-4


@pytest.mark.slow
def test_two_ranks_give_the_same_weights(shapes, trained, tmp_path):
    done = train(shapes, tmp_path / "run", "--hw", "cpu", "--devices", "2", "--accumulate", "1")
    result(done)
    assert "find_unused_parameters" not in done.stderr
    assert relative_difference(parameters(tmp_path / "run"), parameters(trained)) < 1e-4


@pytest.mark.slow
@pytest.mark.xla
def test_xla_gives_the_same_weights_without_recompilation(shapes, trained, tmp_path):
    done = result(train(shapes, tmp_path / "run", "--hw", "tpu", "--precision", "fp32", env=XLA))
    assert done["compilations_after_warmup"] == 0
    assert relative_difference(parameters(tmp_path / "run"), parameters(trained)) < 1e-4


def test_a_resumed_run_ends_in_the_same_bytes(shapes, trained, tmp_path):
    run = tmp_path / "run"
    result(train(shapes, run, "--hw", "cpu", "--accumulate", "1", steps=3))
    resumed = result(train(shapes, run, "--hw", "cpu", "--accumulate", "1"))
    assert resumed["resumed_from"] == 3
    assert same_bytes(run, trained)


def test_evaluation_writes_metrics_and_pictures(trained, tmp_path):
    found = result(tpukit("test", "--run", trained, "--hw", "cpu", "--out", tmp_path, "--json"))
    assert found["samples"] == 16
    rows = list(csv.DictReader((tmp_path / "predictions.csv").open()))
    right = sum(row["label"] == row["predicted"] for row in rows)
    assert found["metrics"]["accuracy"] == right / 16
    low, high = found["intervals"]["accuracy"]
    assert low <= found["metrics"]["accuracy"] <= high
    assert all(
        (tmp_path / name).stat().st_size > 5000 for name in ("confusion.png", "mistakes.png")
    )


def test_the_images_that_are_tested_are_those_meant(shapes, trained, tmp_path):
    """A table's, whose ids images of another part may have; some of each class; the run's own."""
    folder = tmp_path / "shapes"
    shutil.copytree(shapes, folder)

    def tested(**options):
        lines = []
        given = {"data_path": folder, "out": tmp_path / "out", **options}
        tpukit_api.evaluate(trained, hw="cpu", log=lines.append, **given)
        rows = list(csv.DictReader((tmp_path / "out" / "predictions.csv").open()))
        return rows, [line for line in lines if line.startswith("Warning")]

    with pytest.raises(DataError, match=r"'000000' is .*/test/000000\.png or .*/train/") as caught:
        tested(data="test_labels.csv")
    assert "--set folder=NAME" in caught.value.hint
    rows, _ = tested(data="test_labels.csv", settings={"folder": "test"})
    assert {Path(row["file"]).parent for row in rows} == {folder / "test"} and len(rows) == 16
    rows, warnings = tested(limit=8)
    assert len({row["label"] for row in rows}) == 8 and not warnings
    for name in ("a", "b"):
        shutil.copytree(folder / "valid", tmp_path / name / "valid")
        tested(data=str(tmp_path / name / "valid"), out=None)
    kept = [path.parent.name for path in trained.glob("test-*-valid/predictions.csv")]
    assert sorted(name[-8:] for name in kept) == ["-a-valid", "-b-valid"]
    next((folder / "valid" / "star").iterdir()).rename(folder / "train" / "star" / "moved.png")
    assert "may have learned some of those" in tested(limit=8)[1][0]


def test_a_submission_has_the_ids_the_columns_and_the_order_of_the_sample(
    shapes, trained, tmp_path
):
    """A class, or its probabilities; without a sample all of test.csv."""
    classes = sorted((entry.name for entry in (shapes / "train").iterdir()), reverse=True)
    sample, out = tmp_path / "sample_submission.csv", tmp_path / "submission.csv"
    predict = ("predict", "--run", trained, "--hw", "cpu", "--out", out, "--json")
    sample.write_text("id,shape\n" + "".join(f"{i:06},x\n" for i in (5, 2, 11)))
    assert result(tpukit(*predict, "--sample-submission", sample))["rows"] == 3
    named = list(csv.DictReader(out.open()))
    assert [row["id"] for row in named] == ["000005", "000002", "000011"]
    sample.write_text(f"file,{','.join(classes)}\n000003{',0' * 8}\n000001{',0' * 8}\n")
    result(tpukit(*predict, "--sample-submission", sample))
    header, *shares = csv.reader(out.open())
    assert header == ["file", *classes] and [row[0] for row in shares] == ["000003", "000001"]
    assert result(tpukit(*predict, "--set", "probabilities=true"))["rows"] == 16
    by_id = {row.pop("id"): row for row in csv.DictReader(out.open())}
    assert sum(map(float, by_id["000005"].values())) == pytest.approx(1, abs=1e-5)
    assert dict(zip(classes, shares[0][1:], strict=True)) == by_id["000003"]
    for row in named:
        found = by_id[row["id"]]
        assert max(found, key=lambda name: float(found[name])) == row["shape"]
    sample.write_text("file,star,moon\n000003,0,0\n")
    told = failure(tpukit(*predict, "--sample-submission", sample))
    assert "the columns star, moon, neither one of classes" in told


@pytest.mark.parametrize(
    ("column", "values", "settings", "written", "said"),
    [("label", ("0.5", "0.5"), {}, SECOND, "the probability of class 'b'"),
     ("label", ("0", "0.5"), {}, SECOND, "the probability of class 'b'"),
     ("label", ("a", "b"), {"probabilities": True}, SECOND, "the probability of class 'b'"),
     ("b", ("0.5", "0.5"), {}, SECOND, "b is the probability of class 'b'"),
     ("a", ("0.5", "0.5"), {}, ["0.25", "0.875"], "a is the probability of class 'a'"),
     ("label", ("a", "a"), {}, ["b", "a"], "label is the class"),
     ("label", ("0", "0"), {}, ["b", "a"], "the class (a, b, ...); the sample has '0', no class")],
)  # fmt: skip
def test_a_sample_of_one_column_has_what_its_values_are(
    tmp_path, column, values, settings, written, said
):
    target = Target("class", ("label",), ("a", "b"))
    sample, out = tmp_path / "sample_submission.csv", tmp_path / "submission.csv"
    lines = [f"{i:06},{value}\n" for i, value in enumerate(values)]
    sample.write_text(f"id,{column}\n" + "".join(lines))
    probabilities = np.array([[0.25, 0.75], [0.875, 0.125]], np.float32)
    found, told = Predictions(["000000", "000001"], probabilities, target, **settings), []
    write_submission(found, out, read_table(sample), told.append)
    header, *rows = csv.reader(out.open())
    assert header == ["id", column] and [row[1] for row in rows] == written
    assert said in told[0]


def test_flipped_images_are_averaged(shapes, trained, tmp_path):
    """A mirrored image has the same averaged probabilities."""
    from PIL import ImageOps

    folder = tmp_path / "images"
    folder.mkdir()
    image = Image.open(shapes / "test" / "000000.png")
    for name, side in (("a", image), ("b", ImageOps.mirror(image))):
        # timm takes the first 32 of 33 pixels, which a mirrored margin would move.
        ImageOps.expand(side, (0, 0, 1, 1)).save(folder / f"{name}.png")
    out = tmp_path / "out.csv"
    predict = ("predict", "--run", trained, "--hw", "cpu", "--data-path", folder, "--out", out,
               "--set", "tta=flip", "--set", "probabilities=true", "--json")  # fmt: skip
    done = tpukit(*predict)
    assert result(done)["rows"] == 2 and "Warning" not in done.stderr
    told = failure(tpukit(*predict, "--set", "hflip=0"))
    assert "was trained without flip (hflip=0)" in told and "force_tta=true" in told
    assert result(tpukit(*predict, "--set", "hflip=0", "--set", "force_tta=true"))["rows"] == 2
    first, second = (
        [float(v) for v in list(row.values())[1:]] for row in csv.DictReader(out.open())
    )
    assert first == pytest.approx(second, abs=1e-5)


def test_an_exported_readme_prepares_images_as_predict_does(trained, tmp_path, monkeypatch):
    """An oblong image, whose middle is cut out."""
    rng = np.random.default_rng(0)
    (tmp_path / "images").mkdir()
    image = Image.fromarray(rng.integers(0, 256, (50, 90, 3), np.uint8))
    image.save(tmp_path / "images" / "a.png")
    out = tmp_path / "out.csv"
    result(tpukit("predict", "--run", trained, "--hw", "cpu", "--data-path", tmp_path / "images",
                  "--out", out, "--set", "probabilities=true", "--json"))  # fmt: skip
    folder = tmp_path / "export"
    result(tpukit("test", "--run", trained, "--export", folder, "--json"))
    text = (folder / "README.md").read_text()
    assert "short side to 33 pixels" in text and "then the middle 32 x 32" in text
    names = {}
    monkeypatch.chdir(folder)
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL)[1:]:
        exec(code, names)
    with torch.no_grad():
        found = names["model"](names["transform"](image)[None]).softmax(1)[0]
    assert "# model is timm.create_model(" in text and "# predictions = scores.softmax(1)" in text
    (row,) = csv.DictReader(out.open())
    classes = json.loads((folder / "classes.json").read_text())
    assert [float(row[name]) for name in classes] == pytest.approx(found.tolist(), abs=1e-5)


def test_a_damaged_image_ends_the_run_with_its_name(shapes, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(shapes, data)
    damaged = next((data / "train").glob("star/*.png"))
    damaged.write_bytes(damaged.read_bytes()[:100])
    once = ("--hw", "cpu", "--accumulate", "1")
    told = failure(train(data, tmp_path / "run", *once, "--num-workers", "1"))
    assert f"star/{damaged.name}: not an image that can be read" in told
    assert "damaged=skip" in told
    done = result(train(data, tmp_path / "run", *once, "--set", "damaged=skip", steps=1))
    assert done["finished"]
