"""Temporary files go with their command, however it ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from runs import TINY, environment, python, started, wait_until

from tpukit.io.folders import LOCK, own_temporary_folder, remove_abandoned

USING = """
import tempfile, time
from tpukit.io.folders import own_temporary_folder
with own_temporary_folder():
    tempfile.mkdtemp()
    print(tempfile.gettempdir(), flush=True)
    time.sleep(60)
"""


def names(folder):
    return [path.name for path in folder.iterdir()]


def using(base):
    """A process that uses a temporary folder below `base`."""
    return subprocess.Popen(
        [sys.executable, "-c", USING], stdout=subprocess.PIPE, text=True,
        env=environment({"TMPDIR": str(base)}),
    )  # fmt: skip


def test_what_a_killed_command_left_is_removed_and_a_live_ones_is_not(tmp_path_factory):
    base = tmp_path_factory.getbasetemp().parent / "t"
    base.mkdir(exist_ok=True)
    killed, alive = using(base), using(base)
    try:
        left, used = (Path(p.stdout.readline().strip()) for p in (killed, alive))
        assert len(names(left)) == 2 and left.stat().st_mode & 0o777 == 0o700
        killed.kill()
        killed.wait()
        remove_abandoned(base)
        assert not left.exists() and used.exists()
    finally:
        for process in (killed, alive):
            process.kill()
            process.wait()
        remove_abandoned(base)
    assert not names(base)


def test_a_folder_of_somebody_else_is_left_alone(tmp_path):
    (tmp_path / "tpukit-notes").mkdir()
    (tmp_path / "tpukit-file").touch()
    (tmp_path / "tpukit-link").mkdir()
    (tmp_path / "tpukit-link" / LOCK).symlink_to(tmp_path / "tpukit-file")
    remove_abandoned(tmp_path)
    assert len(list(tmp_path.iterdir())) == 3


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
