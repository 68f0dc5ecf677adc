"""BatchNorm and an unused head, and all that a task may choose: the same on any hardware, after a
kill too."""

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

ARGUMENTS = [
    "train", "--task", f"{SUPPORT / 'norm_task.py'}:Free", "--ckpt-every", "2",
    "--log-every", "2", "--precision", "fp32", "--num-workers", "0", "--set", "ema_warmup=0",
    "--set", "best_metric=max:valid_far_auc", "--set", "clip_norm=0",
]  # fmt: skip
EXACT = ("valid_near_rows", "valid_far_rows", "valid_near_ordered", "valid_far_ordered")
SYNCHRONIZED = ["--hw", "cpu", "--devices", "2", "--set", "sync_batchnorm=true"]
WAYS = {
    "one-rank": (["--hw", "cpu"], {}),
    "two-ranks": (SYNCHRONIZED, {}),
    "two-ranks-own-statistics": (SYNCHRONIZED[:4], {}),
    "fsdp-2": ([*SYNCHRONIZED, "--shard"], {}),
    "xla-4": (["--hw", "tpu"], {**VIRTUAL_TPU, "CPU_NUM_DEVICES": "4"}),
}


def run(folder, way):
    arguments, env = WAYS[way]
    words = [*ARGUMENTS, *arguments, "--results-dir", folder, "--json"]
    return tpukit(*words, env=env, ranks=ranks_of(arguments))


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The run of one CPU rank."""
    folder = tmp_path_factory.mktemp("reference") / "run"
    result(run(folder, "one-rank"))
    return folder


MARKS = {"xla-4": [pytest.mark.slow, pytest.mark.xla], "fsdp-2": pytest.mark.slow,
         "two-ranks-own-statistics": pytest.mark.slow}  # fmt: skip


@pytest.mark.parametrize("way", [pytest.param(way, marks=MARKS.get(way, ())) for way in WAYS])
def test_any_hardware_ends_alike_and_a_kill_changes_nothing(tmp_path, reference, way):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    done = run(whole, way)
    summary = result(done)
    assert summary["compilations_after_warmup"] == 0
    assert "left the device" not in done.stderr
    assert ("each rank normalizes by its own rows" in done.stderr) == ("own" in way)
    if "own" not in way:
        for file in ("model", "ema"):
            found, expected = parameters(whole, file), parameters(reference, file)
            assert "enter.1.running_var" in found and "leave.1.num_batches_tracked" in found
            assert relative_difference(found, expected) < 1e-4
        for row, expected in zip(metrics(whole), metrics(reference), strict=True):
            for name, value in expected.items():
                if name.startswith("valid") or name in ("loss", "lr"):
                    assert row[name] == pytest.approx(value, rel=0 if name in EXACT else 1e-3), name
    if "xla" in way:
        assert (summary["graphs"]["train"], summary["graphs"]["accumulate"]) == (1, 1)
    kill_at_step_4(killed, way)
    assert same_bytes(killed, whole)


def kill_at_step_4(folder, way):
    """The same run, killed in its fourth step and resumed."""
    arguments, env = WAYS[way]
    argv = [*ARGUMENTS, *arguments, "--results-dir", folder]
    assert killed_sessions(folder.parent, [(argv, "step:4"), (argv, None)], env) == [9, 0]


def test_ema_averages_statistics_and_copies_counts(reference):
    model, ema = parameters(reference), parameters(reference, "ema")
    assert not torch.allclose(model["enter.1.running_mean"], ema["enter.1.running_mean"])
    assert torch.equal(model["enter.1.num_batches_tracked"], torch.tensor(6))
    assert torch.equal(ema["enter.1.num_batches_tracked"], torch.tensor(6))
    assert torch.equal(ema["passes"], torch.tensor(6, dtype=torch.int16))
