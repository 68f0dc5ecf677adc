"""Compiled programs kept in a folder, and which of them are damaged; torch is not imported."""

import os
import shutil
from pathlib import Path

import pytest

from tpukit.errors import HardwareError
from tpukit.hardware import kept_programs

VARIABLES = [
    *("XLA_PERSISTENT_CACHE_PATH", "XLA_PERSISTENT_CACHE_READ_ONLY"),
    *("TORCH_TPU_TIER2_COMPILATION_CACHE", "TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT"),
    "TORCH_TPU_INTERNAL_TIER3_COMPILATION_CACHE_LOCAL_BACKUP_TASK",
]
PROGRAMS = {"a/0.bin": b"first", "a/1.bin": b"second", "a/2.bin": b"third"}


@pytest.fixture(autouse=True)
def former_variables(monkeypatch):
    for name in VARIABLES:
        monkeypatch.setenv(name, "former")


@pytest.mark.xla
def test_compiled_programs_are_kept_by_versions_and_read_from_a_read_only_folder(
    tmp_path, monkeypatch
):
    kept_programs.keep_programs(tmp_path / "new")
    programs = Path(os.environ["XLA_PERSISTENT_CACHE_PATH"])
    assert programs.is_dir() and programs.parent == tmp_path / "new"
    assert programs.name.startswith("torch_xla-")
    assert os.environ["XLA_PERSISTENT_CACHE_READ_ONLY"] == "0"
    monkeypatch.setattr(kept_programs, "is_writable", lambda folder: False)
    kept_programs.keep_programs(tmp_path / "new")
    assert os.environ["XLA_PERSISTENT_CACHE_READ_ONLY"] == "1"
    with pytest.raises(HardwareError, match="cannot be made"):
        kept_programs.keep_programs(tmp_path / "missing")


@pytest.fixture
def started(monkeypatch, tmp_path, capsys):
    """Starts a process on `tmp_path / "kept"`: its folders in memory and on disk, what it said."""
    versions = {"torch_tpu": "0.2.0", "libtpu": "0.0.52"}
    monkeypatch.setattr(kept_programs, "IN_MEMORY", tmp_path / "memory")
    monkeypatch.setattr(kept_programs, "installed_versions", lambda _: versions)
    monkeypatch.setattr(kept_programs.atexit, "register", lambda _: None)

    def start():
        monkeypatch.setenv("TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT", "none")
        kept_programs.keep_programs(tmp_path / "kept", "torch_tpu")
        on_disk = Path(os.environ["TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT"])
        in_memory = tmp_path / "memory" / os.environ["TORCH_TPU_TIER2_COMPILATION_CACHE"]
        return in_memory, on_disk, capsys.readouterr().err

    return start


@pytest.fixture
def places(started):
    """Both folders after a first start, which compiled and listed `PROGRAMS`."""
    *places, said = started()
    assert said == ""
    for place in places:
        for name, content in PROGRAMS.items():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes(content)
    kept_programs.record_programs()
    return places


def left(place):
    return {str(file.relative_to(place)) for file in place.rglob("*.bin")}


def other_version(file):
    """As if another release's folder had been given this one's name."""
    of_other = kept_programs.CheckedFolder(file.parents[1], "torch_tpu-0.1.0-libtpu-0.0.52")
    of_other.checksums.unlink()
    of_other.record()


DAMAGES = {
    "truncated": lambda file: os.truncate(file, 3),
    "empty": lambda file: os.truncate(file, 0),
    "one bit": lambda file: file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + b"irst"),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"\0"),
    "another program": lambda file: shutil.copy(file.with_name("1.bin"), file),
    "another version": other_version,
    "list cut off": lambda file: os.truncate(file.parents[1] / "programs.sha256", 30),
    "list garbled": lambda file: (file.parents[1] / "programs.sha256").write_bytes(b"\xff\0" * 99),
    "list lost": lambda file: (file.parents[1] / "programs.sha256").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("place", [0, 1])
def test_damaged_programs_are_removed_from_either_place_with_one_line(
    places, started, damage, place
):
    DAMAGES[damage](places[place] / "a/0.bin")
    *_, said = started()
    assert "a/0.bin" not in left(places[place])
    assert left(places[1 - place]) == {*PROGRAMS}
    assert said.count("\n") == 1 and "are damaged or unfinished: they are compiled again" in said
    # Compiled again, to other bytes perhaps, they are whole at the next start.
    for name in {*PROGRAMS} - left(places[place]):
        (places[place] / name).write_bytes(b"compiled again")
    kept_programs.record_programs()
    assert started()[2] == ""
    assert left(places[place]) == {*PROGRAMS}


def test_a_program_that_a_kill_left_unlisted_is_compiled_again(places, started):
    (places[1] / "a/3.bin").write_bytes(b"half a pro")
    assert "1 programs" in started()[2]
    assert left(places[1]) == {*PROGRAMS}


def test_a_read_only_folder_is_used_where_all_of_it_is_whole(places, started, monkeypatch):
    monkeypatch.setattr(kept_programs, "is_writable", lambda folder: False)
    assert started()[1:] == (places[1], "")
    (places[1] / "a/0.bin").write_bytes(b"")
    *_, used, said = started()
    assert used == Path("none") and "it is read-only, and not used" in said
    assert left(places[1]) == {*PROGRAMS}
