"""`tpukit test` on EIT runs, as a user calls it; and the sets it knows."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
from matplotlib.image import imread
from runs import failure, result, tpukit
from scipy.io import loadmat

from tpukit import evaluate as evaluate_api
from tpukit.errors import DataError
from tpukit.tasks.eit.data.dataset import Normalisation
from tpukit.tasks.eit.data.measured import check_units, open_test_set
from tpukit.tasks.eit.data.voltages import SYMMETRIES
from tpukit.tasks.eit.generate import SimulatedData, make_dataset
from tpukit.tasks.eit.pictures import draw_grid
from tpukit.tasks.eit.task import EITTask
from tpukit.train.requests import EvaluationOptions

METRICS = ("correlation", "rmse", "psnr", "ssim")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A data set, the measured sets' layout (made of simulated frames), and a run of one step."""
    root = tmp_path_factory.mktemp("place")
    make_dataset(SimulatedData(30, electrode_degrees=4.0, workers=1), root / "data")
    for name, scale in (("uef2017", 1040.856), ("test2023", 1978.0)):
        (root / "data" / name).mkdir()
        for path in sorted((root / "data" / "valid").glob("*.npz")):
            with np.load(path) as sample:
                np.savez(root / "data" / name / path.name, ys=sample["ys"] * scale, xs=sample["xs"])
    done = tpukit("train", "--size", "tiny", "--hw", "cpu", "--data-path", root / "data",
                  "--results-dir", root / "run", "--global-batch-size", 2, "--accumulate", 1,
                  "--max-steps", 1, "--json")  # fmt: skip
    assert result(done)["steps"] == 1
    return root


@pytest.fixture(scope="module")
def tested(place):
    """The JSON fields of `test` with two samples a measurement."""
    done = tpukit("test", "--run", place / "run", "--hw", "cpu", "--samples", 2,
                  "--sampling-steps", 2, "--out", place / "out", "--json")  # fmt: skip
    return result(done), done.stderr


def test_metrics_baselines_and_intervals(tested):
    fields, told = tested
    assert (fields["task"], fields["data"], fields["samples"]) == ("eit", "simulated", 3)
    expected = {f"{m}{s}" for m in METRICS for s in ("", "_single", "_baseline", "_noser")}
    pooled = {f"rmse_pooled{s}" for s in ("", "_single", "_baseline", "_noser")}
    assert set(fields["intervals"]) == expected and set(fields["metrics"]) == expected | pooled
    for name, (low, high) in fields["intervals"].items():
        assert low <= fields["metrics"][name] <= high
    assert all(fields["metrics"][n] >= fields["metrics"][n.replace("_pooled", "")] for n in pooled)
    assert fields["metrics"]["correlation_noser"] > 0.5
    assert "95 % interval" in told and "PSNR as published" in told
    names = ["ours, mean of 2", "ours, one sample", "Tikhonov", "NOSER"]
    assert list(fields["methods"].values()) == names
    assert all(re.search(rf"^ .*{name}  +-?[\d.]+ \[", told, re.M) for name in names)
    ranges = {"correlation": (-1, 1), "rmse": (0, 99), "psnr": (-99, 99), "ssim": (-1, 1)}
    for name, (low, high) in fields["intervals"].items():
        least, most = ranges[name.partition("_")[0]]
        assert least <= low <= high <= most


def test_predictions_in_both_formats(tested, place):
    with (
        np.load(tested[0]["predictions"]) as saved,
        np.load(next((place / "data" / "test").glob("*009.npz"))) as sample,
    ):
        assert saved["images"].shape == saved["images_baseline"].shape == (3, 128, 128)
        np.testing.assert_array_equal(saved["truth"][0], sample["xs"])
        assert saved["names"].tolist() == ["0000009", "0000019", "0000029"]
        matlab = loadmat(place / "out" / "predictions.mat")
        np.testing.assert_array_equal(matlab["images"], saved["images"])
    rows = (place / "out" / "metrics.csv").read_text().splitlines()
    assert len(rows) == 4 and rows[0].startswith("sample,correlation,rmse")
    mean = np.mean([float(row.split(",")[1]) for row in rows[1:]])
    assert mean == pytest.approx(tested[0]["metrics"]["correlation"], abs=1e-5)


def test_the_picture_has_the_first_eight_frames(place, tmp_path):
    done = tpukit("test", "--run", place / "run", "--hw", "cpu", "--data-path",
                  place / "data/train", "--sampling-steps", 1, "--out", tmp_path, "--limit", 9,
                  "--json")  # fmt: skip
    picture = imread(result(done)["picture"])
    assert 1000 < picture.shape[0] < 1700 and picture.std() > 0.05


@pytest.mark.slow
def test_same_seed_same_images(tested, place):
    again = tpukit("test", "--run", place / "run", "--hw", "cpu", "--samples", 2, "--batch-size", 1,
                   "--sampling-steps", 2, "--out", place / "again", "--json")  # fmt: skip
    result(again)
    with (
        np.load(place / "again" / "predictions.npz") as other,
        np.load(tested[0]["predictions"]) as saved,
    ):
        np.testing.assert_allclose(other["images"], saved["images"], atol=1e-5)


def test_unlabelled_folder_gives_images_without_metrics(place, tmp_path):
    for path in (place / "data" / "test").glob("*.npz"):
        with np.load(path) as sample:
            np.savez(tmp_path / path.name, ys=sample["ys"])
    done = tpukit("test", "--run", place / "run", "--hw", "cpu", "--data", tmp_path, "--limit", 1,
                  "--sampling-steps", 1, "--out", tmp_path / "out", "--json")  # fmt: skip
    fields = result(done)
    assert fields["metrics"] == {} and fields["samples"] == 1
    assert "no metrics" in done.stderr
    with np.load(fields["predictions"]) as saved:
        assert "truth" not in saved.files and saved["images"].shape == (1, 128, 128)


def test_a_run_is_tested_where_its_data_is_no_more(place, tmp_path):
    """The run's own normalisation is used: the data path needs none."""
    shutil.copytree(place / "data" / "uef2017", tmp_path / "uef2017")
    done = tpukit("test", "--run", place / "run", "--hw", "cpu", "--data", "uef2017", "--data-path",
                  tmp_path, "--sampling-steps", 1, "--out", tmp_path / "out", "--json")  # fmt: skip
    assert result(done)["samples"] == 3
    assert "after looking at the measured" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "symmetry",
    [SYMMETRIES[0], SYMMETRIES[4]],
    ids=["as published", "clockwise"],
)
def test_measurements_are_turned_where_the_network_follows(tmp_path, symmetry):
    """Of electrodes that come clockwise, a quarter turn is another one."""
    make_dataset(SimulatedData(120, workers=1), tmp_path / "data")
    for path in (tmp_path / "data").glob("*/*.npz"):
        with np.load(path) as sample:
            ys, xs = symmetry.of_voltages(sample["ys"][:, 0]), sample["xs"]
        np.savez(path, ys=ys[:, None], xs=xs)
    result(tpukit("train", "--size", "tiny", "--hw", "cpu", "--data-path", tmp_path / "data",
                  "--results-dir", tmp_path / "run", "--global-batch-size", 2, "--accumulate", 1,
                  "--max-steps", 1, "--json"))  # fmt: skip
    done = tpukit("test", "--run", tmp_path / "run", "--hw", "cpu", "--samples", 2,
                  "--sampling-steps", 1, "--out", tmp_path / "out", "--json")  # fmt: skip
    assert result(done)["metrics"]["correlation_single"] > 0.5
    assert ("the network sees none of them" in done.stderr) is symmetry.mirrored


@pytest.mark.slow
def test_a_run_from_before_the_refinement_goes_on_and_is_tested(place, tmp_path):
    """Its settings do not name the refinement, nor does its checkpoint."""
    words = ["train", "--size", "tiny", "--hw", "cpu", "--data-path", place / "data",
             "--results-dir", tmp_path / "run", "--global-batch-size", 2, "--accumulate", 1,
             "--set", "schedule=constant", "--json"]  # fmt: skip
    result(tpukit(*words, "--max-steps", 1, "--set", "refinement=false"))
    config = tmp_path / "run" / "config.toml"
    text = config.read_text()
    assert "refinement = false\n" in text
    config.write_text(text.replace("refinement = false\n", ""))
    assert result(tpukit(*words, "--max-steps", 2))["steps"] == 2
    done = tpukit("test", "--run", tmp_path / "run", "--hw", "cpu", "--sampling-steps", 1,
                  "--limit", 2, "--out", tmp_path / "out", "--json")  # fmt: skip
    assert result(done)["samples"] == 2


def slow(*values):
    """One of a test's cases that the default run leaves out."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--data", "uef2071"], ["uef2071", "Did you mean uef2017?"]),
        (["--data", "ktc2023", "--data-path", "RUN"], ["No .npz files", "test2023"]),
        slow(["--run", "nowhere"], ["Run folder nowhere does not exist"]),
        (["--checkpoint", "nowhere.pt"], ["nowhere.pt"]),
        slow(["--checkpoint", "a", "--run", "b"], ["--run and --checkpoint"]),
        slow(["--hw", "gpo"], ["gpo", "gpu"]),
        (["--sampling-steps", "0"], ["--sampling-steps 0", "[1, 1000]"]),
        (["--out", "FILE/below"], ["cannot be written", "--out"]),
    ],
)
def test_wrong_usage(place, tmp_path, arguments, expected):
    (tmp_path / "file").write_text("")
    places = {"RUN": str(place / "run"), "FILE/below": str(tmp_path / "file" / "below")}
    given = [places.get(argument, argument) for argument in arguments]
    usual = [] if {"--run", "--checkpoint"} & set(given) else ["--run", place / "run"]
    hardware = [] if "--hw" in given else ["--hw", "cpu"]
    data = [] if "--checkpoint" not in given else ["--data-path", place / "data"]
    told = failure(tpukit("test", *usual, *hardware, *data, *given, cwd=tmp_path))
    assert all(part in told for part in expected), told


@pytest.mark.parametrize("suffix", [".npz", pytest.param(".mat", marks=pytest.mark.slow)])
def test_predict_writes_the_images_of_a_folder(tested, place, tmp_path, suffix):
    """The run's test split where no folder is named."""
    out = tmp_path / f"images{suffix}"
    folder = ["--data-path", place / "data" / "test"] if suffix == ".mat" else []
    done = tpukit("predict", "--run", place / "run", "--hw", "cpu", "--out", out, *folder, "--json")
    fields = result(done)
    assert (fields["rows"], fields["path"]) == (3, str(out))
    images = loadmat(out)["images"] if suffix == ".mat" else np.load(out)["images"]
    assert images.shape == (3, 128, 128) and np.isfinite(images).all()


def test_predict_with_a_bad_name_or_folder(place, tmp_path):
    base = ["predict", "--run", place / "run", "--hw", "cpu"]
    assert ".mat" in failure(tpukit(*base, "--out", tmp_path / "images.png"))
    assert "no folder nowhere" in failure(tpukit(*base, "--data-path", "nowhere", cwd=tmp_path))


# -- the sets --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["uef2017", "ktc2023"])
def test_measured_sets_come_in_the_simulations_units(place, name):
    expected = open_test_set(str(place / "data" / "valid"), None)
    for path in (place / "data", place / "data" / {"ktc2023": "test2023"}.get(name, name)):
        frames = open_test_set(name, path)
        assert frames.real and frames.electrode_degrees == 10.2
        np.testing.assert_allclose(frames.ys, expected.ys, rtol=1e-6)
        np.testing.assert_array_equal(frames.xs, expected.xs)


def test_simulated_sets_say_their_electrodes(place):
    frames = open_test_set("simulated", place / "data")
    assert (frames.electrode_degrees, frames.real, len(frames.names)) == (4.0, False, 3)
    assert open_test_set("simulated", place / "data", EvaluationOptions(limit=2)).xs.shape == (
        2,
        128,
        128,
    )


def test_voltages_in_other_units_are_noticed(place):
    learned = Normalisation(np.zeros(208, np.float32), np.full(208, 1e-5, np.float32))
    frames = open_test_set(str(place / "data" / "uef2017"), None)
    assert "--data uef2017" in check_units(frames, learned)
    assert check_units(open_test_set("uef2017", place / "data"), learned) is None


def test_empty_folder(tmp_path):
    with pytest.raises(DataError, match=r"No \.npz"):
        open_test_set(str(tmp_path), None)


def test_the_pictures_colours_have_a_scale(tmp_path):
    """A bar from blue to red stands below the images."""
    draw_grid(tmp_path / "grid.png", {"ours": np.zeros((1, 128, 128))}, ["a"], {}, "caption")
    margin = imread(tmp_path / "grid.png")[-110:, :, :3]
    assert (margin[..., 0] > margin[..., 2] + 0.5).any()
    assert (margin[..., 2] > margin[..., 0] + 0.3).any()


def test_a_checkpoint_is_tested_with_the_normalisation_beside_its_folder(tmp_path, monkeypatch):
    """Not with that of `./data`, where another set lies."""
    for name, seed in (("data", 0), ("own", 1)):
        make_dataset(SimulatedData(10, seed, workers=1), tmp_path / name)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    network = EITTask(size="tiny").build_model(None)
    torch.nn.init.normal_(network.voltage_images.linear.weight)
    torch.save({"model": network.state_dict(), "epoch": 3}, "best.pt")

    def images(**place):
        fields = evaluate_api(
            checkpoint="best.pt", settings={"size": "tiny"}, hw="cpu", out="out", sampling_steps=1,
            log=lambda line: None, **place,
        )  # fmt: skip
        return np.load(fields["predictions"])["images"]

    expected = images(data_path="own")
    np.testing.assert_array_equal(images(data="own/test"), expected)
    np.testing.assert_array_equal(images(data="own"), expected)


@pytest.mark.slow
def test_published_checkpoint_is_tested_with_the_datas_normalisation(place, tmp_path):
    """Full width, one sampling step of one sample."""
    torch.manual_seed(0)
    network = EITTask().build_model(None)
    torch.save({"model": network.state_dict(), "epoch": 3}, tmp_path / "best.pt")
    done = tpukit("test", "--checkpoint", tmp_path / "best.pt", "--hw", "cpu", "--data-path",
                  place / "data", "--limit", 1, "--sampling-steps", 1, "--out", tmp_path / "out",
                  "--json")  # fmt: skip
    fields = result(done)
    # The output layer starts at zero: so does the image.
    with np.load(fields["predictions"]) as saved:
        assert not saved["images"].any()
    assert json.dumps(fields)


@pytest.mark.parametrize("note", ["{", "[]", '{"settings": {"electrode_degrees": 1e999}}'])
def test_damaged_settings_of_a_set_are_named(tmp_path, note):
    np.savez(tmp_path / "1.npz", ys=np.ones((208, 1)), xs=np.zeros((128, 128)))
    (tmp_path / ".simulation").mkdir()
    (tmp_path / ".simulation" / "settings.json").write_text(note)
    with pytest.raises(DataError, match=r"settings.json is damaged"):
        open_test_set(str(tmp_path), None)
