"""What a task may choose gives the same run on any hardware, stopped and resumed too."""

import shutil
from pathlib import Path

import pytest
from runs import (
    SUPPORT,
    VIRTUAL_TPU,
    failure,
    latest,
    metrics,
    parameters,
    ranks_of,
    relative_difference,
    result,
    same_bytes,
    tpukit,
)

FREE = f"{SUPPORT / 'free_task.py'}:Free"
BASE = [
    "train", "--task", FREE, "--log-every", "4", "--ckpt-every", "4", "--precision", "fp32",
    "--set", "best_metric=max:valid_far_auc", "--set", "clip_norm=0", "--json",
]  # fmt: skip
FOUR = {**VIRTUAL_TPU, "CPU_NUM_DEVICES": "4"}
WAYS = {
    "two-ranks": (["--hw", "cpu", "--devices", "2"], {}),
    "xla-4": (["--hw", "tpu"], FOUR),
}
EXACT = ("valid_near_rows", "valid_far_rows", "valid_near_ordered", "valid_far_ordered")


def train(run: Path, arguments, env, steps=8, optimizer="Adam"):
    options = ["--max-steps", str(steps), "--set", f"optimizer_class={optimizer}"]
    return result(
        tpukit(
            *BASE, *options, "--results-dir", run, *arguments, env=env, ranks=ranks_of(arguments)
        )
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """One process on a CPU."""
    run = tmp_path_factory.mktemp("whole") / "run"
    train(run, ["--hw", "cpu"], {})
    return run


@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=[pytest.mark.xla, pytest.mark.slow] * ("xla" in way)) for way in WAYS],
)
def test_any_hardware_ends_alike(tmp_path, whole, way):
    arguments, env = WAYS[way]
    summary = train(tmp_path / "run", arguments, env)
    assert relative_difference(parameters(tmp_path / "run"), parameters(whole)) < 1e-4
    for found, expected in zip(metrics(tmp_path / "run"), metrics(whole), strict=True):
        for name, value in expected.items():
            if name.startswith("valid") or name in ("loss", "lr"):
                assert found[name] == pytest.approx(value, rel=1e-3), name
            if name in EXACT:
                assert found[name] == value
    if "xla" in way:
        assert summary["graphs"]["train"] == (2 if "accumulate" in way else 1)
        assert summary["graphs"]["accumulate"] == 1
        assert summary["compilations_after_warmup"] == 0
    resumed_ends_in_the_same_bytes(tmp_path / "run", arguments, env)


@pytest.mark.slow
def test_an_optimizer_of_whole_matrices_is_refused_with_shard(tmp_path):
    arguments = ["--hw", "cpu", "--devices", "2", "--shard", "--results-dir", tmp_path / "run"]
    told = failure(tpukit(*BASE[:-1], *arguments, "--set", "optimizer_class=Adafactor"))
    assert "the optimizer Adafactor needs whole matrices" in told and "--shard" in told


def resumed_ends_in_the_same_bytes(run, arguments, env):
    """From the checkpoint of step 4, in the middle of a pass over the stream."""
    shutil.copytree(run, run.with_name("whole"))
    shutil.rmtree(latest(run))
    (run / "checkpoints" / "latest").write_text("step-00000004\n")
    summary = train(run, arguments, env)
    assert summary["resumed_from"] == 4
    assert same_bytes(run, run.with_name("whole"))
