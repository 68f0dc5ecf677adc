"""BatchNorm, an unused head, a momentum encoder with its queue, and all that a task may choose: the
same on any hardware, after a kill too."""

import pytest
import torch
from runs import (
    SUPPORT,
    VIRTUAL_TPU,
    killed_sessions,
    metrics,
    parameters,
    ranks_of,
    relative_difference,
    result,
    same_bytes,
    tpukit,
)

BASE = ["train", "--ckpt-every", "2", "--log-every", "2", "--precision", "fp32",
        "--num-workers", "0"]  # fmt: skip
TASKS = {
    "free": ["--task", f"{SUPPORT / 'norm_task.py'}:Free", "--set", "ema_warmup=0", "--set",
             "clip_norm=0", "--set", "best_metric=max:valid_far_auc"],
    "moco": ["--task", f"{SUPPORT / 'momentum_task.py'}:MoCo"],
}  # fmt: skip
CPU, RANKS, XLA = ["--hw", "cpu"], ["--hw", "cpu", "--devices", "2"], ["--hw", "tpu"]
ALIKE, CUT = ["--set", "sync_batchnorm=true"], ["--accumulate", "2"]
WAYS = {
    "free": {
        "one-rank": CPU, "two-ranks": [*RANKS, *ALIKE], "own-statistics": RANKS,
        "fsdp-2": [*RANKS, *ALIKE, "--shard"], "xla-4": XLA,
    },
    "moco": {
        "cut": [*CPU, *CUT], "two-ranks": [*RANKS, *CUT], "fsdp-2": [*RANKS, "--shard"],
        "xla-4": [*XLA, *CUT],
    },
}  # fmt: skip
MARKS = {"xla-4": [pytest.mark.slow, pytest.mark.xla], "fsdp-2": pytest.mark.slow,
         "own-statistics": pytest.mark.slow}  # fmt: skip
MARKS |= {("moco", "two-ranks"): pytest.mark.slow}
CASES = [
    pytest.param(task, way, marks=MARKS.get(way) or MARKS.get((task, way), ()))
    for task in WAYS
    for way in WAYS[task]
]
EXACT = ("valid_near_rows", "valid_far_rows", "valid_near_ordered", "valid_far_ordered")


def environment_of(hardware):
    return {**VIRTUAL_TPU, "CPU_NUM_DEVICES": "4"} if "tpu" in hardware else {}


def run(folder, task, hardware):
    words = [*BASE, *TASKS[task], *hardware, "--results-dir", folder, "--json"]
    return tpukit(*words, env=environment_of(hardware), ranks=ranks_of(hardware))


@pytest.fixture(scope="module")
def reference(request, tmp_path_factory):
    """A task and its run of one CPU rank."""
    folder = tmp_path_factory.mktemp("reference") / "run"
    result(run(folder, request.param, CPU))
    return request.param, folder


@pytest.mark.parametrize(("reference", "way"), CASES, indirect=["reference"])
def test_any_hardware_ends_alike_and_a_kill_changes_nothing(tmp_path, reference, way):
    task, expected_run = reference
    hardware, whole, killed = WAYS[task][way], tmp_path / "whole", tmp_path / "killed"
    done = run(whole, task, hardware)
    summary = result(done)
    assert summary["compilations_after_warmup"] == 0
    assert "left the device" not in done.stderr
    assert ("each rank normalizes by its own rows" in done.stderr) == (way == "own-statistics")
    assert ("`after_step` is called once a step" in done.stderr) == ("--accumulate" in hardware)
    for file in ("model", "ema") if way != "own-statistics" else ():
        found, expected = parameters(whole, file), parameters(expected_run, file)
        for state in (found, expected) if task == "moco" else ():
            state["queue"] = state["queue"].sort(0).values  # the ranks' keys in another order
        assert relative_difference(found, expected) < 1e-4
    if task == "free" and way != "own-statistics":
        for row, expected in zip(metrics(whole), metrics(expected_run), strict=True):
            for name, value in expected.items():
                if name.startswith("valid") or name in ("loss", "lr"):
                    assert row[name] == pytest.approx(value, rel=0 if name in EXACT else 1e-3), name
    if (task, way) == ("free", "xla-4"):
        assert (summary["graphs"]["train"], summary["graphs"]["accumulate"]) == (1, 1)
    argv = [*BASE, *TASKS[task], *hardware, "--results-dir", killed]
    sessions = [(argv, "step:4"), (argv, None)]
    assert killed_sessions(tmp_path, sessions, environment_of(hardware)) == [9, 0]
    assert same_bytes(killed, whole)


@pytest.mark.parametrize("reference", ["free"], indirect=True)
def test_ema_averages_statistics_and_copies_counts(reference):
    model, ema = parameters(reference[1]), parameters(reference[1], "ema")
    assert not torch.allclose(model["enter.1.running_mean"], ema["enter.1.running_mean"])
    assert torch.equal(model["enter.1.num_batches_tracked"], torch.tensor(6))
    assert torch.equal(ema["enter.1.num_batches_tracked"], torch.tensor(6))
    assert torch.equal(ema["passes"], torch.tensor(6, dtype=torch.int16))
