"""`--shard` over two ranks of the CPU, through a kill, a resume, `test` and `predict`."""

import csv
import re

import numpy as np
import pytest
from runs import TINY, killed_sessions, parameters, relative_difference, result, tpukit

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
    # Five rows to predict: one rank generates more often than the other.
    "summarize": ["dialogues", "--n", "50"],
}
ONE, TWO = ["--hw", "cpu"], ["--hw", "cpu", "--devices", "2", "--shard"]


def used(task, run, data, out, hardware):
    """Both commands on a trained run."""
    predicted = out / ("predicted.npz" if task == "eit" else "predicted.csv")
    given = ["--run", run, "--data-path", data, *hardware]
    return [
        (["test", *given, "--limit", "4", "--out", out / "tested"], None),
        (["predict", *given, "--out", predicted], None),
    ]


def check_answers(found, expected, tolerance):
    """What `test` and `predict` wrote: texts are equal, numbers up to `tolerance`."""
    names = {f.relative_to(expected) for f in expected.rglob("*") if f.suffix in {".npz", ".csv"}}
    assert len(names) >= 2
    for name in names:
        if name.suffix == ".csv" and name.name != "metrics.csv":
            one, other = ([*csv.reader((run / name).open())] for run in (found, expected))
            assert [[*map(text_of, row)] for row in one] == [[*map(text_of, row)] for row in other]
            one, other = (
                [c for row in t for c in row if c and not text_of(c)] for t in (one, other)
            )
            np.testing.assert_allclose([*map(float, one)], [*map(float, other)], atol=tolerance)
            continue
        one, other = numbers(found / name), numbers(expected / name)
        assert one.keys() == other.keys()
        for key, values in one.items():
            if np.issubdtype(values.dtype, np.floating):
                np.testing.assert_allclose(values, other[key], rtol=tolerance, atol=tolerance)


def text_of(cell):
    """A cell of a table; nothing of a number with decimals, which is compared as one."""
    return "" if re.fullmatch(r"-?\d+\.\d+(e-?\d+)?", cell) else cell


def numbers(file):
    if file.suffix == ".npz":
        return dict(np.load(file))
    head, *rows = [line.split(",") for line in file.read_text().splitlines()]
    return {name: np.array([float(row[place]) for row in rows])
            for place, name in enumerate(head) if place}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_a_sharded_run_is_trained_killed_resumed_tested_and_predicted(tmp_path, task):
    data, whole, sharded = tmp_path / "data", tmp_path / "whole", tmp_path / "sharded"
    env = {"TPUKIT_CACHE_DIR": str(tmp_path / "cache")}
    result(tpukit("data", *DATA[task], "--out", data, "--json", env=env))
    train = [*TASKS[task], "--data-path", data, "--max-steps", "4", "--ckpt-every", "2"]
    train += ["--accumulate", "1", "--precision", "fp32", "--num-workers", "0"]
    in_shards = [*train, *TWO, "--results-dir", sharded]
    plan = [
        ([*train, *ONE, "--results-dir", whole], None),
        *used(task, whole, data, tmp_path / "expected", ONE),
        (in_shards, "step:3:1"),
        (in_shards, None),
        *used(task, sharded, data, tmp_path / "unsharded", ONE),
        *used(task, sharded, data, tmp_path / "found", TWO),
    ]
    assert killed_sessions(tmp_path, plan, env) == [0, 0, 0, 9, 0, 0, 0, 0, 0]
    assert relative_difference(parameters(sharded), parameters(whole)) < 1e-4
    check_answers(tmp_path / "found", tmp_path / "unsharded", 1e-6)
    check_answers(tmp_path / "found", tmp_path / "expected", 1e-3)


@pytest.mark.parametrize("accumulate", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_parts_of_a_container_are_sharded(tmp_path, accumulate):
    """It has no forward pass of its own in which its weights could be gathered."""
    task = TINY.replace(":Tiny", ":Container")
    for name, hardware in (("whole", ONE), ("sharded", TWO)):
        told = tpukit(
            "train", "--task", task, *hardware, "--results-dir", tmp_path / name, "--max-steps",
            "4", "--accumulate", accumulate, ranks=2 if hardware is TWO else 1,
        )  # fmt: skip
        assert told.returncode == 0, told.stderr
    found, expected = parameters(tmp_path / "sharded"), parameters(tmp_path / "whole")
    assert relative_difference(found, expected) < 1e-5


@pytest.mark.parametrize("stacked", ["true", "false"])
def test_layers_that_not_every_rank_uses_are_named(tmp_path, stacked):
    """Else each rank would compute with the other one's layer, or learn from its gradient."""
    task = ["--task", TINY.replace(":Tiny", ":Routed"), "--set", f"stacked={stacked}"]
    told = tpukit("train", *task, *TWO, "--results-dir", tmp_path / "run", ranks=2)
    assert told.returncode == 2 and "do not use the same layers" in told.stderr
    assert "Traceback" not in told.stderr
