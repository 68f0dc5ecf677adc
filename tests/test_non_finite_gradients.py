"""A gradient that is not finite at a finite loss: which step, parameter and sample, and the way on.

Through the command line: the run fails, fails again alike, and goes on from a
finite state to the bytes of an unbroken run once the loss is right.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from runs import (
    SUPPORT,
    VIRTUAL_TPU,
    failure,
    latest,
    metrics,
    parameters,
    result,
    same_bytes,
    tpukit,
)
from safetensors.torch import load_file, save_file
from steep_task import Steep

from tpukit.train import checkpoint
from tpukit.train.task import PlanSettings

STEPS, EVERY = 10, 3
TASK = f"{SUPPORT / 'steep_task.py'}:Steep"
ARGUMENTS = [
    "train", "--hw", "cpu", "--max-steps", str(STEPS), "--ckpt-every", str(EVERY),
    "--log-every", "4",
]  # fmt: skip


def sample_of(step: int) -> int:
    """A sample that the step (from 1) meets."""
    task = Steep()
    plan = task.plan(task.datasets().train, PlanSettings(16, 16, 1, 0))
    return plan.step(step - 1)[0].keys[5].sample


def train(run, *arguments, task=TASK, env=None):
    return tpukit(*ARGUMENTS, "--task", task, "--results-dir", run, *arguments, env=env)


def all_finite(run: Path) -> bool:
    files = [file for path in run.glob("checkpoints/step-*") for file in path.glob("*.safetensors")]
    return all(torch.isfinite(t).all() for file in files for t in load_file(file).values())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An unbroken run with the right loss."""
    run = tmp_path_factory.mktemp("whole") / "run"
    assert train(run).returncode == 0
    return run


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(1, id="first", marks=pytest.mark.slow),
        pytest.param(6, id="after-a-checkpoint"),
        pytest.param(10, id="last", marks=pytest.mark.slow),
    ],
)
def test_the_run_fails_alike_and_goes_on_once_the_loss_is_right(tmp_path, whole, step):
    run, sample = tmp_path / "run", sample_of(step)
    told = failure(train(run, "--set", f"bad={sample}"), code=1)
    assert (
        f"The gradient of '0.weight' and 5 more parameter(s) was not finite in step {step}" in told
    )
    assert f"Training sample {sample} causes it by itself." in told
    assert "Change Steep.loss" in told and "--lr" not in told
    saved = (step - 1) // EVERY * EVERY
    assert (f"resumes from step {saved}, where" if saved else "begins again") in told
    assert failure(train(run, "--set", f"bad={sample}"), code=1) == told
    assert all_finite(run)
    repaired = result(train(run, "--json"))
    assert (repaired["resumed_from"] or 0, repaired["finished"]) == (saved, True)
    assert same_bytes(run, whole)


def test_the_one_parameter_is_named(tmp_path):
    told = failure(
        train(tmp_path / "run", "--set", f"bad={sample_of(2)}", task=f"{TASK[:-5]}Hinged"), code=1
    )
    assert "The gradient of '4.bias' was not finite in step 2" in told


@pytest.mark.parametrize(
    ("hw", "env", "names_sample"),
    [pytest.param(["--devices", "2"], {}, False, marks=pytest.mark.slow),
     (["--accumulate", "4"], {}, True),
     pytest.param(["--hw", "tpu"], VIRTUAL_TPU, True, marks=[pytest.mark.slow, pytest.mark.xla])],
    ids=["two-ranks", "accumulated", "xla"],
)  # fmt: skip
def test_on_other_hardware(tmp_path, hw, env, names_sample):
    run, sample = tmp_path / "run", sample_of(6)
    done = train(run, *hw, "--set", f"bad={sample}", env=env)
    told = done.stderr  # with several ranks, that of the one which failed first
    assert done.returncode == 1 and "Traceback" not in told
    assert "more parameter(s) was not finite in step 6" in told
    assert (f"Training sample {sample} causes" in told) == names_sample
    repaired = result(train(run, *hw, "--json", env=env))
    assert (repaired["resumed_from"], repaired["finished"]) == (3, True)
    assert all_finite(run)


def test_a_step_that_the_scaler_skips_is_counted(tmp_path):
    """Under fp16 the state stays finite: the run ends well, its log counts the step."""
    run = tmp_path / "run"
    arguments = ("--precision", "fp16", "--log-every", "1", "--set", f"bad={sample_of(6)}")
    assert result(train(run, *arguments, "--json"))["finished"]
    rows = [row for row in metrics(run) if row["kind"] == "train"]
    skipped = [row["step"] for row in rows if row["skipped_steps"]]
    assert 6 in skipped and len(skipped) < STEPS / 2
    assert skipped == [row["step"] for row in rows if not row["gradient_norm"] > 0]
    assert all_finite(run)


def test_an_update_that_is_not_finite_ends_the_run(tmp_path):
    """0 / 0 in Adam without eps, at a finite loss and gradient: in the last step, and before."""
    run, task = tmp_path / "run", f"{TASK[:-5]}Exact"
    for steps, what in (("1", "The state stopped being finite by step 1"), ("2", "The loss")):
        told = failure(train(run, "--max-steps", steps, "--no-resume", task=task), code=1)
        assert what in told
        assert not list(run.glob("checkpoints/step-*"))


@pytest.fixture
def poisoned(tmp_path, whole):
    """Poisons checkpoints of a copy of a run as versions before would have written them."""
    run = tmp_path / "run"
    shutil.copytree(whole, run)

    def poison(*steps):
        for step in steps:
            path = run / "checkpoints" / f"step-{step:08d}"
            weights = load_file(path / "model.safetensors")
            weights["0.weight"].fill_(torch.nan)
            save_file(weights, path / "model.safetensors")
            body = json.loads((path / "state.json").read_text())
            body["sha256"]["model.safetensors"] = checkpoint.sha256_of(path / "model.safetensors")
            del body["sha256_of_this"], body["not_finite"]
            body["sha256_of_this"] = checkpoint.sum_of_values(body)
            (path / "state.json").write_text(json.dumps(body))
        return run

    return poison


def test_a_checkpoint_that_holds_nan_is_passed_over(poisoned, whole):
    run = poisoned(10)
    done = train(run)
    assert "Skipping checkpoint step-00000010: 0.weight of model holds nan" in done.stdout
    assert "Using the checkpoint before it: step-00000009." in done.stdout
    assert same_bytes(run, whole)


def test_a_best_checkpoint_that_holds_nan_is_not_used(poisoned):
    run = poisoned(10)
    assert (run / "checkpoints" / "best").read_text() == "step-00000010\n"
    tested = tpukit("test", "--run", run, "--hw", "cpu", "--json")
    assert result(tested)["metrics"]["loss"] > 0
    assert "The best checkpoint is not usable: 0.weight of model holds nan" in tested.stderr


def test_where_every_checkpoint_holds_nan_the_way_on_is_said(poisoned):
    run = poisoned(9, 10)
    told = failure(train(run))
    assert "0.weight of model holds nan" in told
    assert "--no-resume" in told and "--init-from" in told
    assert torch.isnan(parameters(run)["0.weight"]).all() and latest(run).name == "step-00000010"
