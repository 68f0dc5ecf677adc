"""The command line on torch_tpu over the CPU plugin: our tasks, a user's own, kills, refusals."""

import itertools
import json
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from runs import (
    SUPPORT,
    TINY,
    environment,
    failure,
    on_torch_tpu,
    parameters,
    relative_difference,
    result,
    same_bytes,
    tpukit,
)

pytestmark = pytest.mark.torch_tpu
EXPLODING = TINY.replace(":Tiny", ":Exploding")
STEPS = (
    "--max-steps", "20", "--lr", "1e-4", "--precision", "fp32", "--ckpt-every", "20", "--json",
)  # fmt: skip
TASKS = {
    "eit": (
        "train", "--size", "tiny", "--global-batch-size", "4", *STEPS,
    ),
    "summaries": (
        "summarize-train", "--model", "2x2x32", "--block-size", "256", "--init", "scratch",
        "--tokenizer", "train", "--global-batch-size", "4", *STEPS,
    ),
    # Adam divides by its own gradients: a bias that starts at 0 would follow their rounding.
    "images": (
        "train", "--task", "images", "--set", "model=test_convnext", "--set", "image_size=32",
        "--set", "mixup=0.8", "--set", "optimizer=sgd", "--global-batch-size", "8", *STEPS,
        "--lr", "0.05",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A small set for each task."""
    folder = tmp_path_factory.mktemp("data")
    for kind, task, *options in (
        ("eit", "eit", "--n", "20"),
        ("dialogues", "summaries", "--n", "60"),
        ("images", "images", "--n", "80", "--side", "32"),
    ):
        assert tpukit("data", kind, "--out", folder / task, *options).returncode == 0
    return folder


@pytest.fixture(scope="module", params=TASKS)
def task(request, data):
    """A task's name, and how it is trained on the CPU and on the TPU."""

    def train(run, *options, env=None):
        arguments = [*TASKS[request.param], "--data-path", data / request.param]
        return result(tpukit(*arguments, "--results-dir", run, *options, env=env, timeout=500))

    return request.param, train


@pytest.fixture(scope="module")
def runs(task, tmp_path_factory):
    """The same training on the CPU and on the TPU, and what the TPU's printed."""
    folder, (_, train) = tmp_path_factory.mktemp("runs"), task
    train(folder / "cpu", "--hw", "cpu")
    with forgotten_in_memory():
        options = ("--hw", "tpu", "--compile-cache", folder / "cache")
        summary = train(folder / "tpu", *options, env=on_torch_tpu())
    return folder, summary


@contextmanager
def forgotten_in_memory():
    """As on another host: what torch_tpu keeps of programs in memory is gone after the block."""
    in_memory = Path("/dev/shm/torch_tpu_cache")
    before = {*in_memory.glob("*")}
    try:
        yield in_memory
    finally:
        for cache in {*in_memory.glob("*")} - before:
            shutil.rmtree(cache)


def test_compiled_training_ends_in_the_cpus_weights(runs):
    folder, summary = runs
    assert relative_difference(parameters(folder / "tpu"), parameters(folder / "cpu")) < 1e-4
    assert summary["compilations"] > 0
    # Programs of single operations: a few are dispatched after their step was counted.
    assert summary["compilations_after_warmup"] <= 4
    text = (folder / "tpu" / "log.txt").read_text()
    assert "hardware tpu" in text and "torch_tpu 0.2.0 (experimental)" in text


def test_eager_accumulated_training_too(task, runs, tmp_path):
    options = ("--no-compile", "--accumulate", "2", "--hw", "tpu")
    task[1](tmp_path / "run", *options, env=on_torch_tpu())
    whole = parameters(runs[0] / "cpu")
    assert relative_difference(parameters(tmp_path / "run"), whole) < 1e-4


def test_evaluation_and_predictions_agree_with_the_cpus(task, runs, data, tmp_path):
    run, answers, predictions = runs[0] / "tpu", {}, {}
    limit, source = {
        "eit": (("--limit", "2", "--sampling-steps", "2"), ("--data-path", data / "eit" / "test")),
        "summaries": (("--limit", "4"), ("--test-csv", data / "summaries" / "test.csv")),
        "images": ((), ()),
    }[task[0]]
    for hw, env in (("cpu", None), ("tpu", on_torch_tpu())):
        arguments = ("--run", run, "--hw", hw, "--precision", "fp32")
        tested = tpukit(
            "test", *arguments, "--data-path", data / task[0], *limit, "--out", tmp_path / hw,
            "--json", env=env, timeout=500,
        )  # fmt: skip
        answers[hw] = result(tested)["metrics"]
        file = tmp_path / f"{hw}.{'npz' if task[0] == 'eit' else 'csv'}"
        source_and_out = (*source, "--out", file, "--json")
        result(tpukit("predict", *arguments, *source_and_out, env=env, timeout=500))
        predictions[hw] = file
    assert answers["tpu"] == pytest.approx(answers["cpu"], rel=1e-3, abs=1e-3)
    if task[0] == "eit":
        images = [np.load(predictions[hw])["images"] for hw in ("cpu", "tpu")]
        np.testing.assert_allclose(*images, atol=1e-3)
    else:
        assert predictions["cpu"].read_text() == predictions["tpu"].read_text()


def test_killed_and_resumed_in_the_same_bytes(tmp_path):
    argv = [
        "train", "--task", TINY, "--max-steps", "12", "--ckpt-every", "2", "--log-every", "3",
        "--set", "dropout=0.2", "--num-workers", "1", "--hw", "tpu", "--results-dir",
    ]  # fmt: skip
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert tpukit(*argv, whole, env=on_torch_tpu()).returncode == 0
    plan = tmp_path / "plan.json"
    kills = ["step:3", "half:2", "evaluate:1", None]
    plan.write_text(
        json.dumps([{"argv": [*argv, str(killed)], "at": at, "ranks": 1} for at in kills])
    )
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "killed_run.py"), str(plan)],
        env=environment(on_torch_tpu()), capture_output=True, text=True, check=False, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [9, 9, 9, 0]
    assert same_bytes(killed, whole)


def test_a_second_start_of_a_task_compiles_nothing(task, runs, tmp_path):
    """From the folder alone."""
    options = ("--hw", "tpu", "--compile-cache", runs[0] / "cache", "--max-steps", "4")
    with forgotten_in_memory():
        assert task[1](tmp_path / "run", *options, env=on_torch_tpu())["compilations"] == 0


def flipped(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 0xFF
    file.write_bytes(content)


def damage(place):
    """All its programs but the first, each in the next way."""
    first, *others = sorted(place.rglob("*.bin"))
    for file, way in zip(others, itertools.cycle(DAMAGES), strict=False):
        way(file, first)


DAMAGES = [
    lambda file, _: os.truncate(file, file.stat().st_size // 2),
    lambda file, _: os.truncate(file, 0),
    lambda file, _: flipped(file),
    lambda file, first: shutil.copy(first, file),
]


def test_damaged_programs_are_compiled_again(tmp_path):
    """In memory alone, then in the folder too: with a line, to the same weights."""
    folder, compiled = tmp_path / "cache", []

    def start(name):
        done = tpukit(
            "train", "--task", TINY, "--hw", "tpu", "--max-steps", "4", "--json",
            "--compile-cache", folder, "--results-dir", tmp_path / name, env=on_torch_tpu(),
        )  # fmt: skip
        compiled.append(result(done)["compilations"])
        assert "rror" not in done.stderr
        assert same_bytes(tmp_path / name, tmp_path / "whole")
        return done.stderr.count("are damaged or unfinished: they are compiled again")

    with forgotten_in_memory() as memory:
        before = {*memory.glob("*")}
        assert start("whole") == 0
        [in_memory] = {*memory.glob("*")} - before
        damage(in_memory)
        assert start("one tier") == 1
        damage(in_memory)
        damage(folder)
        assert start("both tiers") == 1
    with forgotten_in_memory():
        assert start("again") == 0
    assert compiled == [compiled[0], 0, compiled[0] - 1, 0]
    assert compiled[0] > len(DAMAGES)


def test_a_batch_search_measures_and_finds_what_fits(tmp_path):
    done = tpukit(
        "probe-batch", "--task", EXPLODING, "--set", "rows=8", "--start", "4", "--max", "16",
        "--hw", "tpu", "--json", env=on_torch_tpu(), cwd=tmp_path, timeout=500,
    )  # fmt: skip
    answer = result(done)
    assert answer["largest_batch_per_device"] == 8
    assert [trial["fits"] for trial in answer["trials"][:2]] == [True, True]
    assert not answer["trials"][2]["fits"]


def test_out_of_memory_is_laid_at_its_step(tmp_path):
    """The runtime reports it when a value is read: here that would be the log line of step 20."""
    done = tpukit(
        "train", "--task", EXPLODING, "--set", "step=3", "--hw", "tpu", "--max-steps", "20",
        "--results-dir", tmp_path / "run", env=on_torch_tpu(),
    )  # fmt: skip
    said = failure(done, code=1)
    assert "in step 3" in said
    assert "memory" in said.lower()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--precision", "fp16"), "TPUs do not support fp16"),
        (("--memory-limit", "4GB"), "a TPU's memory cannot be limited"),
        (("--devices", "2"), "runs 1 devices of this host"),
    ],
)
def test_what_the_device_cannot_do(tmp_path, options, said):
    arguments = ("train", "--task", TINY, "--hw", "tpu", "--results-dir", tmp_path / "run")
    assert said in failure(tpukit(*arguments, *options, env=on_torch_tpu()))


def test_ranks_of_a_users_launcher_need_torch_tpus_variables(tmp_path):
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    arguments = ("train", "--task", TINY, "--hw", "tpu", "--results-dir", tmp_path / "run")
    told = failure(tpukit(*arguments, env=on_torch_tpu(**variables)))
    assert "TORCH_TPU_TOPOLOGY" in told and "torch.tpu.distributed" in told


# -- this environment on a machine without a TPU: no plugin stands in for one ---------------------
def test_without_a_tpu_it_is_refused_at_once(tmp_path):
    arguments = ("train", "--task", TINY, "--results-dir", tmp_path / "run", "--hw", "tpu")
    told = failure(tpukit(*arguments, timeout=60))
    assert "no TPU is here" in told and "torch_xla" in told


def test_without_a_tpu_the_cpu_trains(tmp_path):
    """Where torch loads torch_tpu by itself, the first backward pass waits for the network."""
    done = subprocess.run(
        [sys.executable, "-m", "tpukit", "train", "--task", TINY, "--max-steps", "2", "--hw", "cpu",
         "--results-dir", tmp_path / "run"],
        env={n: v for n, v in environment().items() if n != "TORCH_DEVICE_BACKEND_AUTOLOAD"},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def test_without_a_tpu_the_compiler_asks_for_an_environment_of_its_own(tmp_path):
    (tmp_path / "model.py").write_text("import torch\ndef net(): return torch.nn.Linear(8, 8)\n")
    done = tpukit(
        "probe-batch", "--model", "model.py:net", "--input", "x=8", "--target", "v5e-1",
        cwd=tmp_path,
    )  # fmt: skip
    told = failure(done, code=2)
    assert "this environment has torch_tpu" in told and "[plan]" in told
