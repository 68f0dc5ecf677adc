"""Bad input and usage: what is wrong, where, and what to do; no traceback, nothing lost."""

import shutil

import pytest
from disks import mounted
from runs import TINY, VIRTUAL_TPU, failure, here, latest, result, started, tpukit, wait_until

from tpukit.cli import _named
from tpukit.train.run_folder import RunFolder, locked

BASE = ["train", "--task", TINY, "--hw", "cpu", "--max-steps", "4", "--ckpt-every", "2"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of four steps."""
    run = tmp_path_factory.mktemp("finished") / "run"
    assert tpukit(*BASE, "--results-dir", run).returncode == 0
    return run


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--hw", "gpo"], ["--hw 'gpo'", "Did you mean gpu?"]),
        (["--preset", "balancd"], ["Unknown preset 'balancd'", "Did you mean balanced?"]),
        (["--precision", "bf61"], ["--precision 'bf61'", "bf16"]),
        (["--set", "widht=3"], ["no setting 'widht'", "Did you mean width?"]),
        (["--set", "width"], ["NAME=VALUE"]),
        (["--set", "lr=fast"], ["--lr 'fast' is not a number"]),
        (["--lr", "-1", "--log-every", "0"], ["--lr -1.0", "--log-every 0"]),
        (["--epochs", "3"], ["--epochs and --max-steps"]),
        (["--max-time", "soon"], ["--max-time: invalid duration 'soon'", "8h30m"]),
        (["--max-time", ""], ["--max-time: invalid duration ''"]),
        (["--memory-limit", "some"], ["--memory-limit: invalid amount of memory 'some'", "4GB"]),
        (["--num-workers", "9" * 20], ["--num-workers", "[0, 1024]"]),
        (["--max-steps", "9" * 20], ["--max-steps", "[1, 1000000000000]"]),
        (["--lr", "inf"], ["--lr inf", "[0, 1000]"]),
        (["--lr", "nan"], ["--lr nan", "[0, 1000]"]),
        (["--set", "beta1=1"], ["--set beta1 1", "[0, 1)"]),
        (["--set", "loader_timeout=0"], ["--set loader_timeout 0", "[1, 2592000]"]),
        (["--global-batch-size", str(2**63)], ["--global-batch-size", "[1, 2147483647]"]),
        (["--master-port", "70000"], ["--master-port 70000", "[1, 65535]"]),
        (["--results-dir", "x" * 300], ["--results-dir", "File name too long", "xxx...xxx"]),
        (["--config", "http://host/run.toml"], ["--config", "http:/host/run.toml"]),
        (["--config", "/dev/full"], ["--config", "not a regular file"]),
        (["--global-batch-size", "65"], ["larger than the training data (64 samples)"]),
        (["--global-batch-size", "10", "--accumulate", "4"], ["does not divide", "8 or 12"]),
        (["--set", "samples=0"], ["There is no sample."]),
        (["--task", "eitt"], ["no such task", "Did you mean eit?"]),
        (["--task", TINY.replace(":Tiny", ":Tinny")], ["no task class 'Tinny'", "Tiny"]),
        (["--task", "missing.py:Tiny"], ["there is no file", "missing.py"]),
        (["--config", "missing.toml"], ["missing.toml does not exist"]),
        (["--resume-from", "missing"], ["--resume-from missing", "no checkpoint"]),
        (["--epoch", "3"], ["No such option: --epoch", "--epochs"]),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else None,
)
def test_bad_options(tmp_path, arguments, expected):
    told = failure(here(*BASE, "--results-dir", tmp_path / "run", *arguments, cwd=tmp_path))
    assert all(part in told for part in expected), told


def test_control_characters_of_a_value_do_not_reach_the_terminal(tmp_path):
    done = here(*BASE, "--resume-from", f"{tmp_path}/a\x0bb\x1b[2Jc\x85d")
    assert done.returncode == 2
    assert "a\\x0bb\\x1b[2Jc\\x85d" in done.stderr
    assert len(done.stderr.splitlines()) <= 2 and "\x1b" not in done.stderr


def test_nothing_is_left_of_a_run_that_never_began(tmp_path):
    failure(here(*BASE, "--results-dir", tmp_path / "run", "--set", "samples=0"))
    assert not (tmp_path / "run").exists()


def test_a_message_begins_with_the_option_of_the_longest_path():
    """A run's folder within that of the data was said to be --data-path's."""
    words = ["train", "--data-path", "/in/x", "--results-dir", "/in/x/run", "--epochs", "2"]
    assert _named("The run in /in/x/run/fold-0 has", "", words).startswith("--results-dir: The run")
    assert _named("/in/x/train.csv has", "", words) == "--data-path: /in/x/train.csv has"


def test_bad_options_as_json(tmp_path):
    done = tpukit(*BASE, "--preset", "fsat", "--json", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout.startswith('{"error": {"message": "Unknown preset') and "fast" in done.stdout


def test_hardware_that_is_not_there(tmp_path):
    told = failure(tpukit(*BASE, "--hw", "tpu", cwd=tmp_path))
    assert "PJRT_DEVICE=CPU" in told and "probe-batch --target v5e-8" in told
    told = failure(tpukit(*BASE, "--hw", "gpu", cwd=tmp_path, env={"CUDA_VISIBLE_DEVICES": ""}))
    assert "no GPU" in told and "--hw cpu" in told


@pytest.mark.xla
@pytest.mark.parametrize(
    ("options", "said"),
    [(["--precision", "fp16"], "bf16"), (["--global-batch-size", "12"], "8 or 16")],
    ids=["fp16", "batch"],
)
def test_what_eight_devices_of_a_tpu_cannot_do(tmp_path, options, said):
    told = failure(tpukit(*BASE, "--hw", "tpu", *options, cwd=tmp_path, env=VIRTUAL_TPU))
    assert said in told


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("lr = ", "not valid TOML"),
        ("learning_rat = 1", "learning_rat"),
        ("[optim]\na = 1", "[optim]"),
    ],
    ids=["broken", "older", "foreign"],
)
def test_config_files(tmp_path, content, expected):
    (tmp_path / "run.toml").write_text(content)
    assert expected in failure(here(*BASE, "--config", "run.toml", cwd=tmp_path))


def test_a_runs_own_config_is_a_config_file(tmp_path, finished):
    arguments = ["train", "--task", TINY, "--config", finished / "config.toml", "--json"]
    summary = result(tpukit(*arguments, "--results-dir", tmp_path / "run"))
    assert summary["steps"] == 4


@pytest.mark.parametrize("cut", [False, True], ids=["flipped", "cut"])
def test_a_damaged_config_is_not_used(tmp_path, finished, cut):
    shutil.copytree(finished, tmp_path / "run")
    config = tmp_path / "run" / "config.toml"
    text = config.read_text()
    config.write_text(text[: len(text) // 2] if cut else text.replace("max_steps", "max_stepz"))
    told = failure(tpukit("test", "--run", tmp_path / "run", "--hw", "cpu"))
    assert "config.toml is not what the run wrote" in told and "delete its first line" in told


@pytest.mark.parametrize("name", ["log.txt", "metrics.jsonl", "checkpoints/best"])
def test_a_file_of_the_run_that_is_a_folder_or_a_loop(tmp_path, finished, name):
    shutil.copytree(finished, tmp_path / "run")
    file = tmp_path / "run" / name
    file.unlink()
    file.mkdir()
    arguments = [*BASE, "--results-dir", tmp_path / "run", "--max-steps", "6"]
    told = failure(tpukit(*arguments))
    assert f"{file} is not a file" in told and "Rename or remove it" in told
    file.rmdir()
    file.symlink_to(file)
    assert f"{file} is not a file" in failure(tpukit(*arguments))


def test_changed_arithmetic_names_the_fields(finished):
    before = latest(finished)
    arguments = [*BASE, "--results-dir", finished, "--lr", "0.5", "--global-batch-size", "8"]
    told = failure(tpukit(*arguments))
    assert "lr was 0.001, now 0.5" in told and "global_batch_size was 16, now 8" in told
    assert "--no-resume" in told and latest(finished) == before


def test_a_checkpoint_of_another_size_or_task(finished):
    told = failure(tpukit(*BASE, "--results-dir", finished, "--set", "width=64"))
    assert "width was 32, now 64" in told
    other = TINY.replace(":Tiny", ":Weighted")
    told = failure(tpukit(*BASE, "--results-dir", finished, "--task", other))
    assert "task was 'tiny', now 'weighted'" in told


def test_a_folder_that_cannot_be_written(tmp_path):
    """A file is in its way, or the file system is mounted read-only: root may write elsewhere."""
    (tmp_path / "file").write_text("in the way")
    told = failure(tpukit(*BASE, "--results-dir", tmp_path / "file" / "run"))
    assert "cannot be" in told and "--results-dir" in told
    with mounted(tmp_path / "disk", "ro") as folder:
        told = failure(tpukit(*BASE, "--results-dir", folder / "run"))
        assert "cannot be" in told and "--results-dir" in told


def test_a_full_disk_keeps_the_checkpoint_before(tmp_path):
    with mounted(tmp_path / "disk", "size=2m") as folder:
        # A checkpoint takes 0.4 MB; some fit, all that are wanted do not.
        arguments = [*BASE, "--results-dir", folder / "run", "--set", "width=6000"]
        told = failure(tpukit(*arguments, "--ckpt-every", "1"), code=1)
        assert "could not be written" in told and "No space left" in told
        kept = sorted(p.name for p in (folder / "run" / "checkpoints").glob("step-*"))
        assert kept and latest(folder / "run").name == kept[-1]
        assert not list((folder / "run" / "checkpoints").glob(".*partial"))


@pytest.mark.slow
def test_a_run_that_is_refused_removes_nothing_of_the_other(tmp_path):
    """The other has made its folders and its lock, and written nothing yet."""
    folder = RunFolder(tmp_path / "run")
    folder.create()
    with locked(folder):
        before = sorted(folder.path.rglob("*"))
        assert "Another run is writing" in failure(tpukit(*BASE, "--results-dir", folder.path))
        assert sorted(folder.path.rglob("*")) == before


def test_two_live_runs_in_one_folder(tmp_path):
    arguments = [*BASE, "--results-dir", tmp_path / "run", "--max-steps", "1000000",
                 "--set", "pause=0.05"]  # fmt: skip
    with started(*arguments) as first:
        wait_until((tmp_path / "run" / "checkpoints" / "latest").exists, first)
        told = failure(tpukit(*arguments))
        assert f"process {first.pid}" in told and "--results-dir" in told
    summary = result(tpukit(*arguments, "--max-time", "1s", "--json"))
    assert summary["resumed_from"], "the lock must die with its process"


def test_a_task_that_raises(tmp_path):
    broken = TINY.replace(":Tiny", ":Broken")
    arguments = [*BASE, "--task", broken, "--results-dir", tmp_path / "run"]
    assert "the loss of this task is broken" in failure(tpukit(*arguments), code=1)


@pytest.mark.slow
def test_a_task_that_raises_on_one_rank(tmp_path):
    broken = TINY.replace(":Tiny", ":BrokenOnOne")
    arguments = [*BASE, "--task", broken, "--results-dir", tmp_path / "two"]
    done = tpukit(*arguments, "--devices", "2", "--accumulate", "1")
    assert done.returncode == 1
    assert "[rank 1] Error: BrokenOnOne.loss" in done.stderr and "Traceback" not in done.stderr
