"""`--shard` over two ranks of the CPU: killed, resumed, tested and predicted as in one process."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from runs import SUPPORT, environment, parameters, relative_difference, result, tpukit

TASKS = {
    "eit": ["train", "--preset", "quick", "--global-batch-size", "4"],
    "images": ["train", "--task", "images", "--set", "model=test_convnext", "--set",
               "image_size=32", "--set", "optimizer=sgd", "--global-batch-size", "16"],
    "summarize": ["summarize-train", "--model", "2x2x32", "--tokenizer", "train", "--block-size",
                  "256", "--set", "vocabulary_size=400", "--set", "score_samples=6",
                  "--set", "max_new_tokens=12", "--global-batch-size", "16"],
}  # fmt: skip
DATA = {
    "eit": ["eit", "--n", "30", "--workers", "1"],
    "images": ["images", "--n", "160", "--side", "32"],
    "summarize": ["dialogues", "--n", "60"],
}
ONE, TWO = ["--hw", "cpu"], ["--hw", "cpu", "--devices", "2"]


def session(argv, at=None, ranks=1):
    return {"argv": [str(argument) for argument in argv], "at": at, "ranks": ranks}


def used(task, run, data, hardware):
    """Both commands on a trained run."""
    test = ["test", "--run", run, "--limit", "4", "--data-path", data, "--out", run / "tested"]
    predict = [
        "predict",
        "--run",
        run,
        "--data-path",
        data,
        "--out",
        run / ("predicted.npz" if task == "eit" else "predicted.csv"),
    ]
    return [session([*argv, *hardware], ranks=len(hardware) // 2) for argv in (test, predict)]


def answers(run):
    """What `test` and `predict` wrote, numbers and texts apart."""
    arrays = {f.name: dict(np.load(f)) for f in sorted(run.rglob("*.npz"))}
    texts = {f.name: f.read_text() for f in sorted(run.rglob("*.csv"))}
    assert arrays or texts
    return arrays, texts


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_a_sharded_run_is_trained_killed_resumed_tested_and_predicted(tmp_path, task):
    data, whole, sharded = tmp_path / "data", tmp_path / "whole", tmp_path / "sharded"
    env = {"TPUKIT_CACHE_DIR": str(tmp_path / "cache")}
    result(tpukit("data", *DATA[task], "--out", data, "--json", env=env))
    train = [*TASKS[task], "--data-path", data, "--max-steps", "4", "--ckpt-every", "2"]
    train += ["--accumulate", "1", "--precision", "fp32", "--num-workers", "0"]
    in_shards = [*train, *TWO, "--shard", "--results-dir", sharded]
    plan = [
        session([*train, *ONE, "--results-dir", whole]),
        *used(task, whole, data, ONE),
        session(in_shards, at="step:3:1", ranks=2),
        session(in_shards, ranks=2),
        *used(task, sharded, data, TWO),
    ]
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "killed_run.py"), str(tmp_path / "plan.json")],
        env=environment(env), capture_output=True, text=True, check=False, timeout=500,
    )  # fmt: skip
    statuses = json.loads(done.stdout.splitlines()[-1])
    assert statuses == [0, 0, 0, 9, 0, 0, 0], done.stderr[-3000:]
    assert relative_difference(parameters(sharded), parameters(whole)) < 1e-4
    arrays, texts = answers(sharded)
    expected_arrays, expected_texts = answers(whole)
    assert texts == expected_texts
    assert arrays.keys() == expected_arrays.keys()
    for name, expected in expected_arrays.items():
        np.testing.assert_equal(arrays[name].keys(), expected.keys())
        for key, value in expected.items():
            if np.issubdtype(value.dtype, np.floating):
                np.testing.assert_allclose(arrays[name][key], value, rtol=1e-3, atol=1e-3)
