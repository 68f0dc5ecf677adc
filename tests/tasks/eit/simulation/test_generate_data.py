import hashlib
import signal
import subprocess
import time
import uuid
from pathlib import Path

import numpy as np
import pytest
import torch
from disks import mounted
from runs import MARK, failure, popen, result, tpukit, wait_for_end, wait_until

from tpukit.errors import ConfigError, DataError
from tpukit.io.workers import map_ordered
from tpukit.tasks.eit import generate
from tpukit.tasks.eit.data.samples import read_sample
from tpukit.tasks.eit.generate import SimulatedData, make_dataset, split_name


def digest(folder: Path) -> dict[str, str]:
    """Every data file's content, by its place."""
    files = [*folder.glob("*/*.npz"), *folder.glob("*.pth")]
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """60 samples, made in one go."""
    folder = tmp_path_factory.mktemp("made") / "data"
    make_dataset(some(), folder)
    return folder


def some(n: int = 60, start: int = 190, workers: int = 1, **settings) -> SimulatedData:
    return SimulatedData(n, start=start, workers=workers, **settings)


def test_set_is_split_80_10_10_in_the_published_format(made):
    counts = {name: len(list((made / name).glob("*.npz"))) for name in ("train", "valid", "test")}
    assert counts == {"train": 48, "valid": 6, "test": 6}
    with np.load(made / "train" / "0000210.npz", allow_pickle=False) as sample:
        assert {n: (a.shape, a.dtype.name) for n, a in sample.items()} == {
            "ys": ((208, 1), "float32"),
            "xs": ((128, 128), "float32"),
        }


def test_normalisation_is_that_of_the_training_voltages(made):
    voltages = np.stack([np.load(p)["ys"][:, 0] for p in sorted((made / "train").glob("*.npz"))])
    mean, std = (torch.load(made / f"{n}.pth", weights_only=True) for n in ("mean", "std"))
    assert mean.shape == std.shape == (1, 16, 13)
    expected = torch.from_numpy(voltages.astype(np.float64))
    torch.testing.assert_close(mean.ravel(), expected.mean(0).float(), rtol=1e-5, atol=1e-12)
    torch.testing.assert_close(std.ravel(), expected.std(0).float(), rtol=1e-5, atol=1e-12)


def test_a_larger_set_begins_with_the_smaller_one_whatever_the_workers(made, tmp_path, monkeypatch):
    monkeypatch.setattr(generate, "CHUNK_SAMPLES", 10)
    folder = tmp_path / "data"
    make_dataset(some(20, workers=3), folder)
    assert make_dataset(some(), folder)["made"] == 40
    assert digest(folder) == digest(made)


def test_parts_made_apart_are_those_of_the_whole(made, tmp_path):
    make_dataset(some(20, start=195), tmp_path / "part")
    whole = digest(made)
    part = {n: d for n, d in digest(tmp_path / "part").items() if n.endswith(".npz")}
    assert len(part) == 20
    assert part.items() <= whole.items()


def test_same_command_again_makes_nothing_and_a_lost_file_again(made):
    before = digest(made)
    assert make_dataset(some(), made)["made"] == 0
    (made / "valid" / "0000208.npz").unlink()
    assert make_dataset(some(), made)["made"] == 1
    assert digest(made) == before


def test_recon_adds_images(tmp_path):
    make_dataset(SimulatedData(10, recon=True, workers=1), tmp_path)
    with np.load(tmp_path / "train" / "0000000.npz") as sample:
        assert sample["TR"].shape == sample["xs_gn"].shape == (128, 128)
        assert sample["TR"].dtype == np.float32
        assert np.corrcoef(sample["xs_gn"].ravel(), sample["xs"].ravel())[0, 1] > 0.3


def test_killed_again_and_again_the_bytes_are_the_same(made, tmp_path):
    """SIGKILL to the command at two moments; its workers end by themselves."""
    folder = tmp_path / "data"
    command = ("data", "eit", "--out", folder, "--n", 60, "--start", 190, "--workers", 2)
    seen = set()
    for _ in range(2):
        mark = uuid.uuid4().hex
        process = popen(*command, env={MARK: mark})
        before = len(list(folder.glob("*/*.npz")))
        while process.poll() is None and len(list(folder.glob("*/*.npz"))) < before + 9:
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
        wait_for_end(mark)
        seen.add(len(list(folder.glob("*/*.npz"))))
    assert len(seen) > 1
    fields = result(tpukit(*command, "--json"))
    assert (fields["samples"], fields["train"], fields["path"]) == (60, 48, str(folder))
    assert digest(folder) == digest(made)
    assert not list(folder.rglob("*.part*"))


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_interrupted_it_says_how_to_go_on(tmp_path, number):
    folder, mark = tmp_path / "data", uuid.uuid4().hex
    words = ("data", "eit", "--out", folder, "--n", 4000)
    process = popen(*words, env={MARK: mark}, stderr=subprocess.PIPE)
    wait_until(lambda: [*folder.glob("train/*.npz")], process)
    process.send_signal(number)
    told = process.communicate(timeout=60)[1]
    assert process.returncode == 128 + number
    assert "of 4,000 samples" in told and f"goes on: tpukit data eit --out {folder}" in told
    # Nor a warning of the tracker of its semaphores.
    assert "Traceback" not in told and "resource_tracker" not in told
    wait_for_end(mark)


# -- bad input -------------------------------------------------------------------------------------


def test_other_settings_in_the_same_folder_are_named(made):
    before = digest(made)
    other = some(seed=1, labels="difference")
    with pytest.raises(DataError, match=r"seed \(was 0, now 1\), labels \(was classes"):
        make_dataset(other, made)
    with pytest.raises(DataError, match=r"already holds 60 samples, more than --n 20"):
        make_dataset(some(20), made)
    assert digest(made) == before


def test_files_of_others_are_not_mixed_with(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "mine.npz").write_bytes(b"mine")
    with pytest.raises(DataError, match="did not make"):
        make_dataset(SimulatedData(10, workers=1), tmp_path)
    assert (tmp_path / "train" / "mine.npz").read_bytes() == b"mine"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"n": 5}, "--n 5"),
        ({"n": 10, "start": -1}, "--start"),
        ({"noise": "60-33"}, "--noise"),
        ({"electrode_degrees": 25}, "1..20"),
    ],
)
def test_numbers_out_of_range(settings, expected):
    with pytest.raises(ConfigError, match=expected):
        SimulatedData(**settings)


def test_command_line_errors_are_short(tmp_path):
    (tmp_path / "file").write_text("")
    told = failure(tpukit("data", "eit", "--out", tmp_path / "file", "--n", 10))
    assert "file" in told and "--out" in told
    assert "33-60" in failure(tpukit("data", "eit", "--noise", "loud"))
    assert "difference" in failure(tpukit("data", "eit", "--labels", "colours"))


def test_too_small_a_disk_is_seen_before_anything_is_made(tmp_path):
    with mounted(tmp_path / "disk", "size=2m") as folder:
        with pytest.raises(DataError, match=r"1,000 samples take 0\.07 GB") as raised:
            make_dataset(SimulatedData(1000, workers=1), folder / "data")
        assert raised.value.id == "disk-full"


def test_a_disk_that_fills_up_on_the_way_then_more_room(tmp_path):
    """No more than 40 files fit: full in the middle. After remounting, the command goes on."""
    with mounted(tmp_path / "disk", "size=60m,nr_inodes=40") as folder:
        command = ("data", "eit", "--out", folder / "data", "--n", 60)
        told = failure(tpukit(*command), code=1)
        assert "disk is full" in told and "goes on" in told
        there = list((folder / "data").glob("*/*.npz"))
        assert 10 < len(there) < 40
        assert all(np.load(path)["xs"].shape == (128, 128) for path in there)
        assert not list((folder / "data").rglob("*.part*"))
        subprocess.run(["mount", "-o", "remount,nr_inodes=9999", str(folder)], check=True)
        result(tpukit(*command, "--json"))


def test_read_only_folder(tmp_path):
    with mounted(tmp_path / "disk", "ro") as folder:
        with pytest.raises(DataError, match="Read-only") as raised:
            make_dataset(SimulatedData(10, workers=1), folder / "data")
        assert "--out" in raised.value.hint


def test_a_damaged_file_is_named(tmp_path):
    command = ["data", "eit", "--out", tmp_path / "set", "--n", "10", "--json"]
    result(tpukit(*command))
    (tmp_path / "set" / "train" / "0000003.npz").write_bytes(b"")
    assert "0000003.npz is not an .npz file" in failure(tpukit(*command[:-1]))


# -- workers ---------------------------------------------------------------------------------------


def test_a_workers_error_arrives_with_hint_and_id(tmp_path):
    with pytest.raises(DataError, match=r"nowhere\.npz cannot be read") as raised:
        list(map_ordered(read_sample, [tmp_path / "nowhere.npz"], 2))
    assert raised.value.hint and raised.value.id == "data"


def test_splits_by_number():
    assert [split_name(i) for i in range(10)] == ["train"] * 8 + ["valid", "test"]
