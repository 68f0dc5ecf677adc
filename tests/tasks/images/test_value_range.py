"""Images of more than 8 bits: one scale for a data set, kept with the run."""

import csv
import json
import shutil

import numpy as np
import pytest
import tifffile
from PIL import Image
from runs import failure, metrics, result, tpukit

from tpukit.errors import ConfigError, DataError
from tpukit.tasks.images.data import depth
from tpukit.tasks.images.task import ImagesTask

HOUNSFIELD = {"air": [-1000, -900], "bone": [-100, 1055]}
"""Values of the two images of each class."""
SIZES = ["--set", "model=test_convnext", "--set", "image_size=32", "--hw", "cpu"]
SETS = {
    "int16": (np.int16, HOUNSFIELD, (-1000, 1055)),
    "int32": (np.int32, HOUNSFIELD, (-1000, 1055)),
    "float32": (np.float32, HOUNSFIELD, (-1000, 1055)),
    "int8": (np.int8, {"a": [-128, -1], "b": [5, 90]}, (-128, 90)),
    "small int32": (np.int32, {"a": [200, 7], "b": [300, 1]}, (0, 511)),
    "12 bits of 16": (np.uint16, {"a": [4095, 0], "b": [2000, 17]}, (0, 4095)),
    "16 bits": (np.uint16, {"a": [40000, 0], "b": [2000, 17]}, (0, 65535)),
    "uint32": (np.uint32, {"a": [2**32 - 2, 0], "b": [2**31, 1]}, (0, 2**32 - 1)),
    "to 1": (np.float32, {"a": [0.9, 0.001], "b": [0.5, 0.2]}, (0, 1)),
    "to 255": (np.float32, {"a": [200, 0.001], "b": [0.5, 1]}, (0, 255)),
    "counts": (np.float32, {"a": [9000, 0.001], "b": [0.5, 1]}, (0, 9000)),
}


def write(folder, kind, classes):
    """An image of each value: a border of it around a square of the class's other one."""
    for name, values in classes.items():
        for index, value in enumerate(values):
            pixels = np.full((8, 8), values[1 - index], kind)
            pixels[:2] = value
            path = folder / name / f"{index}.tif"
            path.parent.mkdir(parents=True, exist_ok=True)
            tifffile.imwrite(path, pixels)


def shown(task):
    """The pixels of the task's images by file, and what was printed."""
    data = task.datasets()
    parts = [part for part in (data.train, data.valid) if part is not None]
    return data, {part.images.files[i]: np.asarray(part[i]["image"])
                  for part in parts for i in range(len(part))}  # fmt: skip


@pytest.mark.parametrize("name", SETS)
def test_a_value_is_the_same_grey_in_every_file(name, tmp_path, capsys):
    kind, classes, (low, high) = SETS[name]
    write(tmp_path, kind, classes)
    data, pixels = shown(ImagesTask(data_path=str(tmp_path)))
    assert len(pixels) == 4
    for file, found in pixels.items():
        values = tifffile.imread(file).astype(np.float64)
        expected = (values - low) * 255 / (high - low)
        assert (np.abs(found.astype(float) - expected[..., None]) <= 1).all(), file
    told = capsys.readouterr().err
    assert "Values of all 4 images: " in told and f"black is {low:.9g}, white {high:.9g}" in told
    # A run that uses its artifacts decodes other files alike, those beyond the range too.
    task = ImagesTask(data_path=str(tmp_path)).restore(data.artifacts)
    again = {file: np.asarray(task.samples(data.train.images)[i]["image"])
             for i, file in enumerate(data.train.images.files)}  # fmt: skip
    assert all((again[file] == pixels[file]).all() for file in again)


def test_values_are_read_once_for_all_folds_and_again_when_a_file_changes(tmp_path, monkeypatch):
    write(tmp_path, np.int16, HOUNSFIELD)
    folds = [{"data_path": str(tmp_path), "fold": fold, "folds": 2} for fold in (0, 1)]
    read = []
    extremes_of = depth._extremes_of
    monkeypatch.setattr(depth, "_extremes_of", lambda file: read.append(file) or extremes_of(file))
    for settings in (*folds, *folds):
        task = ImagesTask(**settings)
        task.datasets()
        assert (task.values.low, task.values.high) == (-1000, 1055)
    assert len(read) == 4
    tifffile.imwrite(tmp_path / "air" / "0.tif", np.full((9, 9), -1024, np.int16))
    task = ImagesTask(**folds[0])
    task.datasets()
    assert (task.values.low, len(read)) == (-1024, 8)


def test_eight_bits_stay_as_they_are(tmp_path, capsys):
    for name, value in {"a": 7, "b": 60}.items():
        (tmp_path / name).mkdir()
        for index in range(2):
            Image.new("L", (4, 4), value).save(tmp_path / name / f"{index}.png")
    pixels = shown(ImagesTask(data_path=str(tmp_path)))[1]
    assert {int(found.max()) for found in pixels.values()} == {7, 60}
    assert capsys.readouterr().err == ""
    # Beside them 16 bits of their whole range show the same.
    Image.fromarray(np.full((4, 4), 60 * 257, np.uint16)).save(tmp_path / "b" / "0.png")
    with pytest.raises(DataError, match=r"8 bits .* and 16 bits .*: .* no common scale") as caught:
        shown(ImagesTask(data_path=str(tmp_path)))
    assert "value_range=MIN:MAX" in caught.value.hint
    pixels = shown(ImagesTask(data_path=str(tmp_path), value_range="0:65535"))[1]
    assert {int(found.max()) for found in pixels.values()} == {7, 60}
    Image.fromarray(np.full((4, 4), 50000, np.uint16)).save(tmp_path / "b" / "1.png")
    pixels = shown(ImagesTask(data_path=str(tmp_path)))[1]
    assert {int(found.max()) for found in pixels.values()} == {7, 60, 50000 // 257}
    assert "Values of 2 of 4 images: " in capsys.readouterr().err


@pytest.mark.parametrize(("most", "given"), [(4095, None), (65535, None), (65535, "0:4095")])
def test_colours_of_more_than_8_bits_are_not_near_black(tmp_path, most, given):
    """Pillow has the upper 8 bits of them alone."""
    pixels = np.linspace(0, most, 48).astype(np.uint16).reshape(4, 4, 3)
    for name in "abcd":
        (tmp_path / name[0]).mkdir()
        tifffile.imwrite(tmp_path / name[0] / "0.tif", pixels, photometric="rgb")
    task = ImagesTask(data_path=str(tmp_path), value_range=given)
    if most == 65535 and given is None:
        assert {int(found.max()) for found in shown(task)[1].values()} == {255}
        return
    with pytest.raises(DataError, match=r"0\.tif has colours of 16 bits, of which the upper 8"):
        shown(task)


def test_values_without_a_common_scale_are_an_error(tmp_path):
    write(tmp_path, np.int16, {"a": [1, 2], "b": [3, 4]})
    write(tmp_path, np.float32, {"c": [1, 2]})
    with pytest.raises(DataError, match=r"whole numbers .* and floating point .*no common scale"):
        shown(ImagesTask(data_path=str(tmp_path)))
    pixels = shown(ImagesTask(data_path=str(tmp_path), value_range="0:4"))[1]
    assert {int(found.max()) for found in pixels.values()} == {127, 255}
    with pytest.raises(ConfigError, match="value_range '4:0' is not MIN:MAX"):
        ImagesTask(value_range="4:0")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on tissue by its Hounsfield units: black, where each file has a scale from 0."""
    folder = tmp_path_factory.mktemp("units")
    rng = np.random.default_rng(0)
    for part, count in {"train": 24, "valid": 8}.items():
        for name, mean in {"air": -900, "fat": -100}.items():
            (folder / "data" / part / name).mkdir(parents=True)
            for index in range(count):
                values = rng.normal(mean, 20, (32, 32)).astype(np.float32)
                tifffile.imwrite(folder / "data" / part / name / f"{index}.tif", values)
    done = train(folder, "--json")
    assert result(done)["finished"]
    assert "Values of all 64 images: floating point, black is -9" in done.stderr
    return folder


def train(folder, *more):
    return tpukit(
        "train", "--task", "images", "--data-path", "data", "--results-dir", "run", *SIZES,
        "--global-batch-size", "16", "--max-steps", "8", "--lr", "0.01", "--accumulate", "1",
        "--set", "warmup_steps=0", *more, cwd=folder,
    )  # fmt: skip


def test_negative_values_are_told_apart(trained):
    found = result(tpukit("test", "--run", "run", "--hw", "cpu", "--json", cwd=trained))
    assert found["metrics"]["accuracy"] == 1.0
    # One image alone: its scale is the run's.
    for name in ("air", "fat"):
        (trained / name).mkdir()
        shutil.copy(trained / "data" / "valid" / name / "0.tif", trained / name)
        tpukit("predict", "--run", "run", "--hw", "cpu", "--data-path", name, "--out", "out.csv",
               cwd=trained)  # fmt: skip
        rows = list(csv.DictReader((trained / "out.csv").open()))
        assert [row["label"] for row in rows] == [name]


@pytest.mark.slow
def test_two_ranks_have_one_range(trained):
    again = train(trained, "--devices", "2", "--results-dir", "ranks", "--json")
    assert result(again)["finished"] and again.stderr.count("Values of all") == 1
    kept = [
        trained / run / "checkpoints/step-00000008/value_range.json" for run in ("run", "ranks")
    ]
    assert kept[0].read_bytes() == kept[1].read_bytes()
    shown = [metrics(trained / run)[-1]["valid_loss"] for run in ("run", "ranks")]
    assert shown[0] == pytest.approx(shown[1], rel=1e-3)


def test_files_of_another_kind_are_refused(trained):
    (trained / "others").mkdir()
    tifffile.imwrite(trained / "others" / "1.tif", np.full((32, 32), -900, np.int16))
    predict = ("predict", "--run", "run", "--hw", "cpu", "--data-path", "others")
    told = failure(tpukit(*predict, cwd=trained))
    assert "1.tif has whole numbers; the data set's scale is that of floating point" in told
    given = ("--set", "value_range=-1000:0", "--json")
    assert result(tpukit(*predict, *given, cwd=trained))["rows"] == 1
    told = failure(train(trained, "--set", "value_range=-1000:0"))
    assert "value_range was '-9" in told and "now '-1000:0'" in told
    kept = trained / "run" / "checkpoints" / "step-00000008" / "value_range.json"
    assert json.loads(kept.read_text())["kinds"] == ["floating point"]
