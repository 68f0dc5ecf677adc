"""probe-batch from the command line: recommendations, and errors of every kind."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runs import failure, here, is_running, popen, result, tpukit, wait_until

TASKS = Path(__file__).parents[1] / "support" / "probe_tasks.py"
XLA = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1"}


def probe(task: str, *arguments: str, **environment: str):
    words = ["--task", f"{TASKS}:{task}", "--json", *arguments]
    return tpukit("probe-batch", *words, env=environment)


def error(done, code: int) -> dict:
    """The JSON object of a command that failed."""
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return json.loads(done.stdout)["error"]


def check_both_sides(found: dict) -> None:
    fits = {trial["batch"]: trial["fits"] for trial in found["trials"]}
    largest = found["largest_batch_per_device"]
    assert fits[largest]
    assert not fits[largest + 1]
    assert all(trial["seconds"] > 0 for trial in found["trials"])


LIMITED = ("--hw", "cpu", "--memory-limit", "400MB")


@pytest.mark.slow
def test_the_largest_batch_under_a_limit_trains_and_a_larger_one_does_not(tmp_path):
    found = result(probe("Hungry", *LIMITED))
    check_both_sides(found)
    largest = found["largest_batch_per_device"]
    assert found["target"] is None
    assert all(trial["samples_per_second"] > 0 for trial in found["trials"] if trial["fits"])
    assert "--memory-limit 400000000" in found["command"]
    assert train_at(largest, tmp_path / "fits").returncode == 0
    over = train_at(-(-largest * 11 // 10) + 1, tmp_path / "over")
    assert over.returncode == 1 and "memory" in over.stderr


def test_memory_of_the_tasks_own_tables_does_not_count_against_the_limit():
    """A run builds its task before the limit is set; so does a trial."""
    found = result(probe("Library", "--hw", "cpu", "--memory-limit", "300MB", "--max", "1"))
    assert found["largest_batch_per_device"] == 1


@pytest.mark.xla
def test_batches_sent_ahead_count():
    """24 samples are 96 MB: one batch would fit into 500 MB, the ones that a run holds do not."""
    once = ("--hw", "tpu", "--memory-limit", "500MB", "--start", "24", "--max", "24",
            "--multiple-of", "12")  # fmt: skip
    (first, *_) = result(probe("Wide", *once, **XLA))["trials"]
    assert (first["batch"], first["fits"]) == (24, False)


def train_at(rows: int, folder: Path):
    return tpukit(
        "train", "--task", f"{TASKS}:Hungry", "--global-batch-size", str(rows), "--accumulate", "1",
        "--num-workers", "0", "--results-dir", folder, *LIMITED,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.xla
def test_xla_under_a_limit():
    found = result(
        probe("Hungry", "--hw", "tpu", "--memory-limit", "1GB", "--multiple-of", "4", **XLA)
    )
    largest = found["largest_batch_per_device"]
    fits = {trial["batch"]: trial["fits"] for trial in found["trials"]}
    assert fits[largest] and not fits[largest + 4]


@pytest.mark.slow
def test_a_global_batch_size_gets_its_accumulation():
    found = result(probe("Hungry", *LIMITED, "--max", "8", "--global-batch-size", "32"))
    assert found["recommended_global_batch"] == 32
    assert found["recommended_batch_per_device"] * found["accumulate"] == 32
    assert "--accumulate" in found["command"]


def test_every_batch_may_fit_up_to_the_maximum():
    found = result(probe("Hungry", "--hw", "cpu", "--max", "6"))
    assert found["largest_batch_per_device"] == 6
    assert all(trial["fits"] for trial in found["trials"])


def test_a_kill_by_the_system_is_a_batch_that_does_not_fit():
    limited = ("--hw", "cpu", "--memory-limit", "8GB")
    found = result(probe("Killed", *limited, "--set", "bad_rows=2", "--start", "1", "--max", "2"))
    assert found["largest_batch_per_device"] == 1
    said = "killed by the system for lack of memory (SIGKILL)"
    assert any(trial["error"] == said for trial in found["trials"])


@pytest.mark.slow
def test_two_ranks_run_a_trial_together_and_may_be_killed():
    several = ["--hw", "cpu", "--devices", "2", "--max", "6", "--memory-limit", "8GB"]
    # In a process of its own: forks of a fork cannot be the ranks of a trial.
    words = ["probe-batch", "--task", f"{TASKS}:Killed", "--json", *several, "--set", "bad_rows=6"]
    done = subprocess.run(
        [sys.executable, "-m", "tpukit", *words], capture_output=True, text=True, check=False
    )
    found = result(done)
    assert found["devices"] == 2
    assert found["largest_batch_per_device"] == 5
    assert found["largest_global_batch"] == 10
    assert any("SIGKILL" in (trial["error"] or "") for trial in found["trials"])


@pytest.mark.slow
def test_a_trial_that_does_not_end_in_time_is_slow_and_ends_the_search():
    """Whether it fits is unknown: it is not the smallest batch that does not fit."""
    found = result(probe("Hangs", "--hw", "cpu", "--set", "bad_rows=5", "--time-limit", "40s"))
    slow = found["trials"][-1]
    assert (slow["verdict"], slow["fits"]) == ("slow", None)
    assert slow["error"] == "no result within 40s (--time-limit)"
    assert (found["stopped_by"], found["slow_batch_per_device"]) == ("time", slow["batch"])
    assert found["smallest_failed_batch_per_device"] is None
    assert found["largest_batch_per_device"] == found["recommended_batch_per_device"] == 4
    assert found["estimated_largest_batch_per_device"] > 4


def test_no_batch_is_tried_that_holds_a_sample_twice():
    """A small network would fit in thousands; there are 256 samples."""
    found = result(probe("Opens", "--hw", "cpu", "--memory-limit", "8GB", "--set", "width=64",
                         "--start", "100"))  # fmt: skip
    assert (found["stopped_by"], found["largest_batch_per_device"]) == ("data", 256)


@pytest.mark.parametrize(
    ("task", "arguments", "code", "name", "says"),
    [
        pytest.param(
            "Hangs",
            ["--set", "bad_rows=1", "--time-limit", "4s"],
            1,
            "trial-timeout",
            "batch 1, the smallest: no result within 4.0s",
            marks=pytest.mark.slow,
        ),
        ("Crashes", ["--set", "bad_rows=1"], 1, "trial-crashed", "SIGSEGV at "),
        ("Mistaken", ["--set", "bad_rows=1"], 1, "task-failed", "TypeError: a matrix was expected"),
        ("Hungry", ["--memory-limit", "3MB", "--start", "1"], 1, "nothing-fits", "not even 1"),
    ],
)
def test_a_trial_that_fails_for_another_reason_is_an_error(task, arguments, code, name, says):
    found = error(probe(task, "--hw", "cpu", *arguments), code)
    assert found["id"] == name
    assert says in found["message"]
    assert found["hint"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--target", "v5e-7"], "v5e-7"),
        (["--start", "0"], "--start"),
        (["--margin", "1.5"], "--margin"),
        (["--max", "4", "--multiple-of", "8"], "--multiple-of"),
        (["--target", "v5e-8", "--memory-limit", "4GB"], "--memory-limit"),
        (["--target", "v5e-8", "--devices", "4"], "--devices"),
        (["--target", "v5e-8", "--precision", "fp16"], "fp16"),
        (["--hw", "tpu"], "no TPU"),
        (["--time-limit", "soon"], "soon"),
    ],
)
def test_bad_usage(arguments, says):
    found = error(probe("Hungry", *arguments), 2)
    assert says in found["message"]
    assert found["hint"]


HANGING = ("probe-batch", "--task", f"{TASKS}:Hangs", "--set", "bad_rows=1", "--hw", "cpu")


def test_ctrl_c_leaves_nothing_running():
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = popen(*HANGING, **streams, start_new_session=True)
    assert "Batch 4" in process.stdout.readline()
    child = child_of(process)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert process.stdout.read().endswith("Interrupted.\n")
    process.stdout.close()
    wait_until(lambda: not is_running(child), seconds=5)


def child_of(process: subprocess.Popen) -> int:
    """The process of a trial, once there is one."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    wait_until(children.read_text, process)
    return int(children.read_text().split()[0])


def test_killing_the_parent_ends_the_child():
    process = popen(*HANGING, start_new_session=True)
    child = child_of(process)
    # The child asks the kernel to end with its parent once it runs Python.
    time.sleep(3)
    process.kill()
    process.wait()
    wait_until(lambda: not is_running(child), seconds=5)


# -- a model without a task ------------------------------------------------------------------------
MODEL = """
from torch import nn

def make(width=16, wide=1_048_576):
    return nn.Sequential(nn.Flatten(), nn.Linear(12, width), nn.Linear(width, wide))
"""


def test_a_bare_model_is_measured(tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    found = result(
        tpukit("probe-batch", "--model", f"{tmp_path / 'model.py'}:make", "--input", "image=3x2x2",
               "--set", "wide=64", "--hw", "cpu", "--start", "2", "--max", "2", "--json")
    )  # fmt: skip
    assert found["task"] == f"{tmp_path / 'model.py'}:make" and found["command"] is None
    assert found["largest_batch_per_device"] == 2
    assert found["parameters"] == 12 * 16 + 16 + 16 * 64 + 64


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "gone.py:make", "--input", "x=3", "--hw", "cpu"], "there is no file"),
        (["--model", "m.py:make"], "m.py:make has no input"),
        (["--model", "m.py:make", "--input", "x=3:float8"], "'x=3:float8' cannot be read"),
        (["--input", "x=3"], "only a model of your own takes inputs"),
        (["--task", "llm", "--model", "m.py:make"], "exclude each other"),
    ],
)
def test_bad_usage_of_a_bare_model(arguments, says, tmp_path):
    (tmp_path / "m.py").write_text(MODEL)
    told = failure(here("probe-batch", *arguments, cwd=tmp_path))
    assert says in told and len(told.splitlines()) == 2


@pytest.mark.slow
@pytest.mark.plan
@pytest.mark.xla
def test_a_bare_model_is_compiled(tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    words = ["--input", "image=3x2x2", "--target", "v5e-8", "--max", "64", "--json"]
    done = tpukit("probe-batch", "--model", f"{tmp_path / 'model.py'}:make", *words,
                  env={"TPUKIT_CACHE_DIR": str(tmp_path)})  # fmt: skip
    found = result(done)
    assert (found["target"], found["devices"]) == ("v5e-8", 8)
    assert found["memory"]["parameters"] == pytest.approx(4 * 17 * 1_048_576, rel=0.01)
    assert found["memory"]["temporaries"] > 0 and found["step"]["flops"] > 0


# -- the compiler ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.plan
@pytest.mark.xla
def test_the_compilers_reports_are_used_and_cached(tmp_path):
    asked = ("--target", "v5e-8", "--start", "2", "--max", "2", "--shard")
    cache = {"TPUKIT_CACHE_DIR": str(tmp_path)}
    first = result(probe("Hungry", *asked, **cache))
    assert (first["target"], first["devices"]) == ("v5e-8", 8)
    assert first["compiles"] > 0
    assert first["limit_bytes"] == int(15.75 * 2**30)
    assert first["memory"]["temporaries"] > 0
    assert first["collectives"].get("all-reduce", 0) > 0
    assert first["step"]["flops"] > 0 and first["step"]["estimate_seconds"] > 0
    assert first["largest_allocations"]
    again = result(probe("Hungry", *asked, **cache))
    assert again["compiles"] == 0
    assert again["memory"] == first["memory"]
    assert "--hw tpu" in again["command"]


COMPLEX = """
import torch


class Complex(torch.nn.Linear):
    def forward(self, x):
        doubled = super().forward(x).double()
        return torch.complex(doubled, doubled).prod(1).real


def make():
    return Complex(16, 16)
"""


@pytest.mark.slow
@pytest.mark.plan
@pytest.mark.xla
def test_a_failure_of_the_compiler_itself_is_no_lack_of_memory(tmp_path):
    """libtpu 0.0.21 fails for complex numbers of 128 bits; the error's text is explained, too."""
    model, log = tmp_path / "complex.py", tmp_path / "log.txt"
    model.write_text(COMPLEX)
    words = ["--model", f"{model}:make", "--input", "x=16", "--target", "v5e-1", "--start", "2"]
    cache = {"TPUKIT_CACHE_DIR": str(tmp_path)}
    found = error(tpukit("probe-batch", *words, "--json", env=cache), 1)
    assert found["id"] == "task-failed" and "--kernels off" in found["hint"]
    # An error, or a check that ends the process: both are the compiler's.
    message = "batch 2: the TPU compiler fails, not for lack of memory: (INTERNAL: RET_CHECK|Check)"
    assert re.match(message, found["message"])
    log.write_text(f"tpukit: {found['message']}\n")
    explained = tpukit("doctor", "--explain", log, "--json")
    assert explained.returncode == 1
    assert json.loads(explained.stdout)["explanations"][0]["id"] == "xla-compile-defect"


@pytest.mark.slow
@pytest.mark.plan
@pytest.mark.xla
def test_a_read_in_the_middle_of_the_step_is_reported_with_its_place():
    found = error(probe("Reads", "--set", "bad_rows=1", "--target", "v5e-1"), 1)
    assert found["id"] == "leaves-device"
    assert "aten::_local_scalar_dense" in found["message"]
    assert "probe_tasks.py:" in found["message"]
    assert ".item()" in found["message"]
    assert "torch.where" in found["hint"]


@pytest.mark.slow
@pytest.mark.plan
@pytest.mark.xla
@pytest.mark.parametrize(
    ("task", "operator", "line", "instead"),
    [
        ("FallsBack", "aten::_pdist_backward", "nn.functional.pdist", "XLA lacks it"),
        ("Selects", "aten::nonzero", 'batch["x"][batch["x"] > 0]', "depends on values"),
    ],
)
def test_what_leaves_the_device_is_named_with_the_models_line(task, operator, line, instead):
    """A gradient has no line of its own: it is that of the forward pass."""
    found = error(probe(task, "--set", "bad_rows=1", "--target", "v5e-1"), 1)
    assert found["id"] == "leaves-device"
    assert operator in found["message"] and line in found["message"]
    assert "probe_tasks.py:" in found["message"]
    assert instead in found["hint"]


@pytest.mark.plan
def test_without_the_plan_extra_the_hint_names_it(tmp_path):
    """A path on which libtpu cannot be found stands in for an environment without it."""
    hide = tmp_path / "sitecustomize.py"
    hide.write_text(
        "import importlib.metadata as m\n"
        "real = m.version\n"
        "def version(name):\n"
        "    if name == 'libtpu': raise m.PackageNotFoundError(name)\n"
        "    return real(name)\n"
        "m.version = version\n"
    )
    found = error(probe("Hungry", "--target", "v5e-1", PYTHONPATH=str(tmp_path)), 2)
    assert found["id"] == "no-plan-extra"
    assert "libtpu" in found["message"]
    assert ".[plan]" in found["hint"]


@pytest.mark.plan
def test_versions_that_do_not_match_are_named(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.metadata as m\n"
        "real = m.version\n"
        "m.version = lambda name: '0.9.9' if name == 'libtpu' else real(name)\n"
    )
    found = error(probe("Hungry", "--target", "v5e-1", PYTHONPATH=str(tmp_path)), 2)
    assert found["id"] == "plan-versions"
    assert "libtpu 0.9.9" in found["message"] and "libtpu 0.0.21" in found["message"]


@pytest.mark.slow
def test_gpus_that_are_not_here_side_by_side(tmp_path):
    file = tmp_path / "wide.py"
    file.write_text("import torch\n\ndef make():\n    return torch.nn.Linear(4096, 4096)\n")
    words = ("probe-batch", "--model", f"{file}:make", "--input", "x=4096")
    small, large = result(
        tpukit(*words, "--max", "65536", "--compare", "2GB,t4", "--json")
    )["compared"]  # fmt: skip
    check_both_sides(small)
    assert small["largest_batch_per_device"] < large["largest_batch_per_device"]
    least, most = small["memory_range"]
    assert small["allocated_bytes"] < least <= most <= small["limit_bytes"]
    assert {"parameters", "context", "allocator"} <= small["memory"].keys()
    message = error(tpukit(*words, "--target", "t5", "--json"), 2)
    assert "t4" in message["hint"]
