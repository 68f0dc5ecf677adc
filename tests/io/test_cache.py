"""The cache folder: the one that is named, the user's, or a temporary one."""

import os
import stat
from pathlib import Path

import pytest

from tpukit.io.files import is_writable
from tpukit.io.folders import VARIABLE, cache_folder, own_temporary_folder


@pytest.fixture(autouse=True)
def _not_named(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)


def test_the_named_folder_comes_first(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    assert cache_folder() == tmp_path / "user" / "tpukit"
    monkeypatch.setenv(VARIABLE, str(tmp_path / "named"))
    assert cache_folder() == tmp_path / "named"


def test_a_home_that_cannot_be_written_is_replaced(tmp_path_factory, monkeypatch):
    """Every command of the user takes the same folder, which nobody else can read."""
    # A short name: a command makes no folder of its own in a long one.
    base = tmp_path_factory.mktemp("t")
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/cache")
    monkeypatch.setenv("TMPDIR", str(base))
    monkeypatch.setattr("tempfile.tempdir", None)
    folder = cache_folder()
    with own_temporary_folder():
        assert folder == cache_folder() == base / f"tpukit_cache_{os.getuid()}"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_folder_to_be_made_is_as_writable_as_the_one_it_goes_into(tmp_path):
    assert is_writable(tmp_path / "a" / "b")
    (tmp_path / "file").write_text("")
    assert not is_writable(tmp_path / "file" / "b")
    assert not is_writable(Path("/proc/none")), "root may, and cannot"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
