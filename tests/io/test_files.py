"""Atomic writes: the old content or the new, whatever fails in between."""

import errno
import hashlib
import os
import subprocess
import sys

import pytest

from tpukit.io.files import (
    how_to_go_on,
    replacing,
    replacing_folder,
    sha256_of,
    write_file,
)


def test_a_write_replaces_the_file_and_leaves_nothing_beside_it(tmp_path):
    path = tmp_path / "values.json"
    path.write_bytes(b"old")
    write_file(path, b"new")
    assert path.read_bytes() == b"new" and list(tmp_path.iterdir()) == [path]


def test_a_reader_sees_the_old_content_until_the_end(tmp_path):
    path = tmp_path / "values.json"
    path.write_bytes(b"old")
    with replacing(path) as partial:
        partial.write_bytes(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_an_error_keeps_the_old_file_and_removes_the_partial_one(tmp_path, error):
    path = tmp_path / "values.json"
    path.write_bytes(b"old")
    with pytest.raises(type(error)), replacing(path) as partial:
        partial.write_bytes(b"half")
        raise error
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_a_failed_write_names_the_file_and_a_way_on(tmp_path):
    """The system's error names no file where a disk, or a limit on the size of files, is full."""
    with pytest.raises(OSError) as found, replacing(tmp_path / "loss.png"):
        raise OSError(errno.EFBIG, "File too large")
    assert found.value.filename == str(tmp_path / "loss.png")
    assert "ulimit -f" in how_to_go_on(found.value)
    assert "Free some space" in how_to_go_on(OSError(errno.ENOSPC, "full"))


def test_a_folder_appears_whole(tmp_path):
    path = tmp_path / "step-1"
    (tmp_path / ".step-1.partial").mkdir()
    (tmp_path / ".step-1.partial" / "leftover").touch()
    with replacing_folder(path) as partial:
        (partial / "model").write_bytes(b"weights")
        assert not path.exists()
    assert [file.name for file in path.iterdir()] == ["model"]
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_removes_the_partial_folder(tmp_path):
    with pytest.raises(RuntimeError), replacing_folder(tmp_path / "step-1") as partial:
        (partial / "model").touch()
        raise RuntimeError
    assert not list(tmp_path.iterdir())


def test_sums_are_sha256(tmp_path):
    (tmp_path / "file").write_bytes(b"content")
    assert sha256_of(tmp_path / "file") == hashlib.sha256(b"content").hexdigest()


def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path):
    path = tmp_path / "train[1].csv"
    script = f"""
import os, pathlib, signal
from tpukit.io.files import replacing
with replacing(pathlib.Path({str(path)!r})) as partial:
    partial.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", script], check=False)
    assert [file.suffix for file in tmp_path.iterdir()] == [".partial"]
    with replacing(path) as partial:
        partial.write_bytes(b"whole")
    assert path.read_bytes() == b"whole" and list(tmp_path.iterdir()) == [path]


def test_a_pipe_or_a_device_is_not_replaced_by_a_file(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="not a regular file"):
        write_file(pipe, b"content")
    assert pipe.is_fifo()
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]
