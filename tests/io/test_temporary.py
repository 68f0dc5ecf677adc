"""Temporary files go with their command."""

import os
import signal
import tempfile
from pathlib import Path

import pytest
from runs import TINY, python, started, wait_until

from tpukit.io.folders import own_temporary_folder


def names(folder):
    return [path.name for path in folder.iterdir()]


def test_temporary_files_are_the_users_own_and_go_with_the_command(tmp_path_factory, monkeypatch):
    base = tmp_path_factory.getbasetemp().parent
    monkeypatch.setenv("TMPDIR", str(base))
    monkeypatch.setattr("tempfile.tempdir", None)
    with own_temporary_folder():
        folder = Path(tempfile.gettempdir())
        assert folder.parent == base and folder.stat().st_mode & 0o777 == 0o700
        with own_temporary_folder():  # a child's
            assert Path(tempfile.gettempdir()) == folder
    assert not folder.exists() and Path(tempfile.gettempdir()) == base


def test_without_a_home_matplotlib_keeps_its_files_in_it(tmp_path_factory):
    """In a folder of its own it would warn, and end with a traceback: that is gone by then."""
    code = "from tpukit.io.folders import own_temporary_folder as own\n"
    code += "with own():\n    import matplotlib\n    print(matplotlib.get_configdir())"
    base = tmp_path_factory.getbasetemp().parent
    no_home = {"HOME": "/proc/none", "XDG_CONFIG_HOME": "", "TMPDIR": str(base)}
    done = python("-c", code, env=no_home)
    assert done.stdout.startswith(f"{base}/tpukit-") and not done.stderr


@pytest.mark.slow
def test_a_launch_with_workers_leaves_nothing_behind(tmp_path_factory):
    """torchrun's logs, torch's modules and multiprocessing's sockets lie in it too."""
    base = tmp_path_factory.getbasetemp().parent / "l"
    base.mkdir(exist_ok=True)
    run = tmp_path_factory.mktemp("launch") / "run"
    words = ("train", "--task", TINY, "--hw", "cpu", "--devices", 2, "--max-steps", 1000000,
             "--set", "pause=0.2", "--num-workers", 2, "--ckpt-every", 2)  # fmt: skip
    env = {"TMPDIR": str(base), "TORCHINDUCTOR_CACHE_DIR": str(run.parent / "c")}
    with started(*words, "--results-dir", run, env=env) as process:
        wait_until((run / "checkpoints" / "latest").exists, process)
        assert [name.startswith("tpukit-") for name in names(base)] == [True]
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    assert names(base) == []


@pytest.mark.parametrize("files", [[], ["kernel.so"]])
def test_what_torch_compiled_stays_and_an_empty_folder_goes(monkeypatch, tmp_path, files):
    """torch 2.15 makes the folder as it starts, whether it compiles or not."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    # Set and deleted: what the folder sets goes again after the test.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tpukit.io.folders.LONGEST", 1000)
    with own_temporary_folder():
        compiled = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        compiled.mkdir()
        for name in files:
            (compiled / name).touch()
    assert compiled.parent == tmp_path
    assert [path.name for path in compiled.glob("*")] == files
    assert compiled.exists() == bool(files)


def test_without_a_place_for_it_the_command_works(monkeypatch):
    monkeypatch.setattr("tempfile.mkdtemp", lambda **_: (_ for _ in ()).throw(OSError("full")))
    before = dict(os.environ)
    with own_temporary_folder():
        assert dict(os.environ) == before
