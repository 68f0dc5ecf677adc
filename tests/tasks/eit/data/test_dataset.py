import io
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_backend import FakeBackend
from runs import environment

from tpukit.errors import CheckpointError, DataError
from tpukit.io.workers import map_ordered
from tpukit.tasks.eit.data import samples as packed
from tpukit.tasks.eit.data.dataset import (
    Normalisation,
    data_normalisation,
    existing_data_path,
    find_normalisation,
    open_split,
    save_normalisation,
)
from tpukit.tasks.eit.data.measured import open_test_set
from tpukit.tasks.eit.data.samples import list_samples, load_samples, read_sample
from tpukit.tasks.eit.data.voltages import voltage_map
from tpukit.tasks.eit.generate import SimulatedData, make_dataset
from tpukit.tasks.eit.task import EITTask

YS, XS = np.full((208, 1), 1e-5, np.float32), np.zeros((128, 128), np.float32)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """20 samples of the simulator."""
    folder = tmp_path_factory.mktemp("source") / "data"
    make_dataset(SimulatedData(20, workers=1), folder)
    return folder


@pytest.fixture(autouse=True)
def own_caches(tmp_path, monkeypatch):
    """Caches and ./data of this test alone; 12 files are many, as 300 are outside."""
    monkeypatch.setattr(packed, "UNPACKED_FILES", 10)
    monkeypatch.setattr(packed, "CHUNK_FILES", 20)
    monkeypatch.setattr(packed, "map_ordered", in_this_process)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TPUKIT_CACHE_DIR", raising=False)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


def in_this_process(function, items, workers):
    """Packs as `map_ordered` does; processes start in half a second."""
    return map(function, items)


def write_samples(folder: Path, count: int, offset: float = 0.0) -> Path:
    """`count` samples whose values tell their number."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        np.savez(folder / f"{i:05d}.npz", ys=YS * i, xs=np.full_like(XS, i % 50 + offset))
    return folder


def check_samples(samples, count: int, offset: float = 0.0) -> None:
    assert samples.ys.shape == (count, 208) and samples.xs.shape == (count, 128, 128)
    numbers = np.arange(count)
    np.testing.assert_array_equal(samples.ys[:, 7], YS[0] * numbers.astype(np.float32))
    expected = (numbers % 50 + offset).astype(np.float32)
    np.testing.assert_array_equal(samples.xs[:, 3, 4].astype(np.float32), expected)


# -- what the engine reads -------------------------------------------------------------------------


def test_a_sample_is_a_normalised_map_and_its_image(source):
    data = open_split(source, "train")
    files = sorted((source / "train").glob("*.npz"))
    assert len(data) == len(files) == 16
    mean, std = (torch.load(source / f"{n}.pth", weights_only=True) for n in ("mean", "std"))
    for index in (0, 9, 15):
        with np.load(files[index]) as stored:
            sample = data[index]
            expected = voltage_map(stored["ys"], mean.numpy(), std.numpy())
            np.testing.assert_allclose(sample["voltages"][0], expected, rtol=1e-5, atol=1e-6)
            np.testing.assert_array_equal(sample["image"][0], stored["xs"])
        assert {n: (a.shape, a.dtype.name) for n, a in sample.items()} == {
            "voltages": ((1, 16, 16), "float32"),
            "image": ((1, 128, 128), "float32"),
        }


def test_the_task_reads_both_splits_and_keeps_the_normalisation(source):
    task = EITTask(size="tiny", data_path=str(source))
    data = task.datasets()
    assert (len(data.train), len(data.valid)) == (16, 2)
    other = EITTask(size="tiny").restore(data.artifacts)
    np.testing.assert_array_equal(other.normalisation.std, data.train.normalisation.std)


def test_opening_data_leaves_the_task_as_it_was(source):
    task = EITTask(size="tiny", data_path=str(source))
    before = dict(vars(task))
    task.initialize(task.build_model(FakeBackend()), task.datasets())
    assert vars(task) == before


def test_a_run_keeps_its_normalisation_where_the_data_has_another(source, tmp_path):
    shutil.copytree(source, tmp_path / "data")
    kept = EITTask(size="tiny", data_path=str(source)).datasets().artifacts
    save_normalisation(tmp_path / "data", Normalisation(*np.ones((2, 208), np.float32)))
    task = EITTask(size="tiny", data_path=str(tmp_path / "data")).restore(kept)
    assert task.datasets().artifacts == kept
    assert (task.datasets().train.normalisation.std < 1).all()


def test_a_missing_path_is_an_error_where_data_is_there(source):
    Path("data").symlink_to(source)
    with pytest.raises(DataError, match="no data at elsewhere"):
        open_split("elsewhere", "test")
    assert len(open_split("data", "test")) == 2


# -- the data's identity ---------------------------------------------------------------------------


def test_the_identity_is_of_the_content_not_of_place_or_time(source, tmp_path):
    shutil.copytree(source, tmp_path / "copy", copy_function=shutil.copyfile)
    places = (source, tmp_path / "copy")
    first, copy = (EITTask(data_path=str(place)).datasets().identity for place in places)
    assert first == copy and first["data"]
    path = next((tmp_path / "copy" / "valid").glob("*.npz"))
    with np.load(path) as sample:
        np.savez(path, ys=sample["ys"], xs=-sample["xs"])
    assert EITTask(data_path=str(tmp_path / "copy")).datasets().identity != first


def test_packed_and_read_samples_have_the_same_digest(tmp_path, monkeypatch):
    folder = write_samples(tmp_path / "data" / "train", 12)
    files = list_samples(folder)
    packed_samples = load_samples(files)
    monkeypatch.setattr(packed, "UNPACKED_FILES", 12)
    assert load_samples(files).digest() == packed_samples.digest()


def test_the_digest_of_a_pack_is_computed_once(tmp_path, monkeypatch):
    files = list_samples(write_samples(tmp_path / "data" / "train", 12))
    digest = load_samples(files).digest()
    monkeypatch.setattr(packed, "_digest", None)
    assert load_samples(files).digest() == digest


DAMAGES = {
    "a flipped byte": lambda path: path.write_bytes(flipped(path.read_bytes())),
    "cut": lambda path: os.truncate(path, 5000),
    "empty": lambda path: path.write_bytes(b""),
    "no array": lambda path: path.write_bytes(b"text"),
    "missing": Path.unlink,
}


def flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 64]) + content[middle + 1 :]


@pytest.mark.parametrize(
    ("name", "damage"),
    [*(("xs.npy", damage) for damage in DAMAGES), ("ys.npy", "a flipped byte"),
     ("meta.json", "missing"), ("meta.json", "cut")],
)  # fmt: skip
def test_a_damaged_pack_is_built_again(tmp_path, name, damage):
    files = list_samples(write_samples(tmp_path / "data" / "train", 12))
    samples = load_samples(files)
    digest = samples.digest()
    DAMAGES[damage](Path(samples.xs.filename).with_name(name))
    again = load_samples(files)
    check_samples(again, 12)
    assert again.digest() == digest == packed._digest(again.ys, again.xs)


def test_a_copied_pack_is_used_as_it_is(tmp_path, monkeypatch):
    """A data set that was saved with its pack, as Kaggle does."""
    files = list_samples(write_samples(tmp_path / "data" / "train", 12))
    digest = load_samples(files).digest()
    for path in (tmp_path / "data" / ".packed").rglob("*.npy"):
        os.utime(path)
    monkeypatch.setattr(packed, "_build", None)
    assert load_samples(files).digest() == digest
    monkeypatch.setattr(packed, "_digest", None)
    assert load_samples(files).digest() == digest, "its content is read once"


# -- normalisation ---------------------------------------------------------------------------------


def test_normalisation_beside_the_splits_goes_before_data(tmp_path):
    first, second = tmp_path / "one", tmp_path / "two"
    for folder, value in ((first, 1.0), (second, 2.0)):
        folder.mkdir()
        values = np.full(208, value, np.float32)
        save_normalisation(folder, Normalisation(values, values))
    assert find_normalisation([first, second]).mean[0] == 1
    assert find_normalisation([tmp_path / "none", second]).mean[0] == 2
    (first / "uef2017").mkdir()
    # A measured set's own folder: the public code looks in the parent.
    assert data_normalisation(first / "uef2017").mean[0] == 1


def test_normalisation_travels_with_a_run():
    values = Normalisation(*np.random.default_rng(0).random((2, 208)).astype(np.float32))
    again = Normalisation.from_bytes(values.to_bytes())
    np.testing.assert_array_equal(again.mean, values.mean)
    np.testing.assert_array_equal(again.std, values.std)
    with pytest.raises(CheckpointError, match="normalisation"):
        Normalisation.from_bytes(b"broken")


# -- the pack --------------------------------------------------------------------------------------


def test_many_files_are_packed_once_and_mapped(tmp_path, monkeypatch):
    monkeypatch.setattr(packed, "map_ordered", map_ordered)
    folder = write_samples(tmp_path / "data" / "train", 24)
    samples = load_samples(list_samples(folder))
    check_samples(samples, 24)
    assert isinstance(samples.xs, np.memmap) and samples.xs.dtype == np.float16
    written = Path(samples.xs.filename).stat().st_mtime_ns
    assert Path(load_samples(list_samples(folder)).xs.filename).stat().st_mtime_ns == written


def test_a_changed_file_makes_a_new_pack_and_removes_the_old(tmp_path):
    folder = write_samples(tmp_path / "data" / "train", 12)
    old = Path(load_samples(list_samples(folder)).xs.filename)
    np.savez(folder / "00003.npz", ys=YS * 3, xs=np.full_like(XS, 9))
    new = load_samples(list_samples(folder))
    assert new.xs[3, 0, 0] == 9
    assert not old.exists() and Path(new.xs.filename).exists()


@pytest.mark.parametrize("inexact", [slice(None), slice(27, 28)], ids=["all", "a late one"])
def test_images_that_need_it_keep_full_precision(tmp_path, inexact):
    folder = write_samples(tmp_path / "data" / "train", 60)
    for path in list_samples(folder)[inexact]:
        number = int(path.stem)
        np.savez(path, ys=YS * number, xs=np.full_like(XS, number % 50 + 0.1))
    samples = load_samples(list_samples(folder))
    assert samples.xs.dtype == np.float32
    assert samples.xs[27, 0, 0] == np.float32(27.1)


def test_mapped_samples_travel_to_workers_by_name(tmp_path):
    folder = write_samples(tmp_path / "data" / "train", 12)
    content = pickle.dumps(load_samples(list_samples(folder)))
    assert len(content) < 10_000
    check_samples(pickle.loads(content), 12)


def test_read_only_data_is_packed_in_the_cache_folder(tmp_path, monkeypatch):
    folder = write_samples(tmp_path / "data" / "train", 12)
    # Root may write anywhere; a file in the way stands for a folder that cannot be written.
    (tmp_path / "data" / ".packed").write_text("")
    samples = load_samples(list_samples(folder))
    check_samples(samples, 12)
    assert Path(samples.xs.filename).is_relative_to(tmp_path / "cache")


def test_without_any_room_files_are_read_into_memory(tmp_path, monkeypatch, capsys):
    folder = write_samples(tmp_path / "data" / "train", 12)
    monkeypatch.setattr(packed.shutil, "disk_usage", lambda path: type("Full", (), {"free": 0}))
    samples = load_samples(list_samples(folder))
    check_samples(samples, 12)
    assert not isinstance(samples.xs, np.memmap)
    assert "no room to pack" in capsys.readouterr().err


PACK = """
import sys
from pathlib import Path
from tpukit.tasks.eit.data.samples import list_samples, load_samples
samples = load_samples(list_samples(Path(sys.argv[1])))
print(len(samples.ys), float(samples.xs[-1, 0, 0]))
"""


def pack_in_child(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PACK, str(folder)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment(), **streams)


def test_two_processes_at_once_make_one_pack(tmp_path):
    folder = write_samples(tmp_path / "data" / "train", 1200)
    children = [pack_in_child(folder) for _ in range(2)]
    told = [child.communicate(timeout=120) for child in children]
    assert [out.split() for out, _ in told] == [["1200", "49.0"]] * 2
    packs = [p for p in (tmp_path / "data" / ".packed" / "train").iterdir() if p.is_dir()]
    assert len(packs) == 1


def test_killed_while_packing_the_next_one_packs_anew(tmp_path):
    folder = write_samples(tmp_path / "data" / "train", 1200)
    home = tmp_path / "data" / ".packed" / "train"
    child = pack_in_child(folder)
    while not list(home.glob(".*.partial/xs.npy")):
        assert child.poll() is None
        time.sleep(0.002)  # the moment is short
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert list(home.glob(".*.partial"))
    check_samples(load_samples(list_samples(folder)), 1200)
    assert not list(home.glob(".*.partial"))


# -- bad input -------------------------------------------------------------------------------------


def test_no_data_says_how_to_make_some():
    with pytest.raises(DataError, match="no data at nowhere") as raised:
        open_split("nowhere", "train")
    assert "tpukit data eit --out nowhere" in raised.value.hint


def test_data_path_that_is_a_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("")
    with pytest.raises(DataError, match="is a file"):
        existing_data_path(path)


def test_missing_and_empty_splits(tmp_path):
    (tmp_path / "train").mkdir()
    with pytest.raises(DataError, match=r"train holds no \.npz"):
        open_split(tmp_path, "train")
    with pytest.raises(DataError, match="has no folder valid/"):
        open_split(tmp_path, "valid")


def saved(**arrays):
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


def spoiled(array, value):
    array = array.copy()
    array.flat[5] = value
    return array


class Trap:
    """A pickle that would leave a trace if it were loaded."""

    def __reduce__(self):
        return (os.mkdir, ("trapped",))


def single_array():
    stream = io.BytesIO()
    np.save(stream, XS)
    return stream.getvalue()


BAD_FILES = {
    "text": (b"no npz at all", ["not an .npz"]),
    "empty": (b"", ["not an .npz"]),
    "truncated": (saved(ys=YS, xs=XS)[:-3000], ["not an .npz"]),
    "flipped": (
        saved(ys=YS, xs=XS)[:40_000] + b"!" + saved(ys=YS, xs=XS)[40_001:],
        ["`xs`", "damaged"],
    ),
    "pickle": (pickle.dumps({"ys": YS}), ["not an .npz"]),
    "array": (single_array(), ["single array"]),
    "pickled field": (saved(ys=np.array([Trap()], object), xs=XS), ["`ys`", "pickled", "never"]),
    "no ys": (saved(xs=XS), ["no field `ys`", "it has: xs"]),
    "no xs": (saved(ys=YS), ["no field `xs`"]),
    "ys shape": (saved(ys=YS[:200], xs=XS), ["`ys`", "(200, 1)", "(208,)"]),
    "xs shape": (saved(ys=YS, xs=XS[:64]), ["`xs`", "(64, 128)", "(128, 128)"]),
    "text field": (saved(ys=np.full((208, 1), "a"), xs=XS), ["`ys`", "numbers"]),
    "nan": (saved(ys=spoiled(YS, np.nan), xs=XS), ["`ys`", "nan at [5]", "finite"]),
    "infinite": (saved(ys=YS, xs=spoiled(XS, np.inf)), ["`xs`", "inf at [0, 5]"]),
}


@pytest.mark.parametrize(
    ("name", "count"),
    [*((name, 3) for name in BAD_FILES), *((n, 60) for n in ("text", "flipped", "no ys", "nan"))],
)
def test_bad_files_are_named_with_their_field(tmp_path, name, count):
    content, expected = BAD_FILES[name]
    folder = write_samples(tmp_path / "data" / "train", count)
    bad = folder / f"{count - 1:05d}.npz"  # of many it is not among those that are looked at first
    bad.write_bytes(content)
    save_normalisation(folder.parent, Normalisation(*np.ones((2, 208), np.float32)))
    with pytest.raises(DataError) as raised:
        open_split(folder.parent, "train")
    for part in [str(bad), *expected]:
        assert part in raised.value.message
    assert raised.value.hint
    assert not Path("trapped").exists()
    assert not list((folder.parent / ".packed").rglob(".*.partial"))


def test_an_unreadable_file(tmp_path):
    (tmp_path / "gone.npz").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataError, match="cannot be read"):
        read_sample(tmp_path / "gone.npz")


def test_flat_voltages_are_taken_too(tmp_path):
    np.savez(tmp_path / "flat.npz", ys=YS[:, 0])
    ys, xs = read_sample(tmp_path / "flat.npz", image=False)
    assert ys.shape == (208,) and xs is None


def test_missing_and_bad_normalisation(tmp_path):
    folder = write_samples(tmp_path / "data" / "train", 2).parent
    with pytest.raises(DataError, match=r"No mean\.pth") as raised:
        open_split(folder, "train")
    assert "tpukit data eit" in raised.value.hint
    torch.save(torch.ones(1, 16, 13), folder / "mean.pth")
    with pytest.raises(DataError, match=r"std\.pth is missing"):
        open_split(folder, "train")
    for bad, expected in (
        (torch.ones(1, 16, 12), "16, 12"),
        (torch.zeros(1, 16, 13), "positive"),
        (torch.full((1, 16, 13), float("nan")), "finite"),
        ({"std": 1}, "not a tensor"),
        ([Trap()], "not a tensor"),
    ):
        torch.save(bad, folder / "std.pth")
        with pytest.raises(DataError, match=expected):
            open_split(folder, "train")
    assert not Path("trapped").exists()


@pytest.mark.parametrize("name", ["uef2017", "simulated"])
def test_a_folder_to_predict_may_have_a_known_set_s_name(name):
    for folder, value in ((f"data/{name}", 1.0), (name, 2.0)):
        Path(folder).mkdir(parents=True)
        np.savez(f"{folder}/0.npz", ys=np.full((208, 1), value, np.float32))
    assert open_test_set(Path(name)).ys.max() == 2.0
