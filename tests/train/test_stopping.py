"""Requests to stop within a step, validation at a time limit, and the end of a pass."""

import os
import signal
import time
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from norm_task import Normalizing
from tiny_task import Rows, Tiny
from torch import nn

import tpukit
from tpukit.errors import InterruptedRunError
from tpukit.train import engine, monitor
from tpukit.train.checkpoint import list_checkpoints
from tpukit.train.run_folder import RunFolder
from tpukit.train.run_log import read_metrics
from tpukit.train.schedule import completes_pass
from tpukit.train.task import Datasets


class Dropping(Normalizing):
    """BatchNorm's statistics and dropout change in each forward pass; `stop_at` names one."""

    name = "dropping"

    def __init__(self, stop_at: int = 0, pause: float = 0.0, data_path: str = "") -> None:
        self.stop_at = stop_at
        self.pause = pause
        self.passes = 0

    def loss(self, model, batch):
        self.passes += model.training
        if self.passes == self.stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(self.pause)
        image = nn.functional.dropout(batch["image"], 0.3, training=model.training)
        return super().loss(model, {**batch, "image": image})


@pytest.fixture
def steps_are_long(monkeypatch):
    """Every step counts as a long one."""
    monkeypatch.setattr(engine, "LONG_STEP_SECONDS", -1.0)
    monkeypatch.setattr(monitor, "SHOWN_SECONDS", 0.0)


def fit(task, folder, **settings):
    lines = []
    options = {"hw": "cpu", "max_steps": 6, "global_batch_size": 16, "accumulate": 4, **settings}
    result = tpukit.fit(task, results_dir=str(folder), log=lines.append, **options)
    return result, lines


def weights(folder, step):
    found = {c.name: c for c in list_checkpoints(RunFolder(folder).checkpoints)}
    from safetensors.torch import load_file

    return {
        name: load_file(found[f"step-{step:08d}"] / f"{name}.safetensors")
        for name in ("model", "optimizer", "ema")
    }


def test_a_step_that_is_dropped_leaves_nothing(tmp_path, steps_are_long):
    """Stopped in the third of four micro-batches of the fourth step, and resumed: the same bytes
    as a run that nobody stopped."""
    fit(Dropping(), tmp_path / "whole")
    with pytest.raises(InterruptedRunError, match="Stopped after step 3 of 6"):
        fit(Dropping(stop_at=3 * 4 + 3), tmp_path / "stopped")
    result, _ = fit(Dropping(), tmp_path / "stopped")
    assert (result.resumed_from, result.finished) == (3, True)
    whole, resumed = weights(tmp_path / "whole", 6), weights(tmp_path / "stopped", 6)
    for file, tensors in whole.items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, resumed[file][name]), (file, name)


def test_a_short_step_is_finished(tmp_path):
    with pytest.raises(InterruptedRunError, match="Stopped after step 4 of 6"):
        fit(Dropping(stop_at=3 * 4 + 3), tmp_path / "run")


def test_a_time_limit_ends_the_first_step(tmp_path, steps_are_long):
    """Its micro-batches are shown meanwhile, and nothing is saved."""
    result, lines = fit(Dropping(pause=0.6), tmp_path / "run", max_time=1)
    assert (result.steps, result.finished) == (0, False)
    assert [line for line in lines if "forward pass 1 of 4 micro-batch(es) after" in line]
    assert not list_checkpoints(RunFolder(tmp_path / "run").checkpoints)


# -- validation ----------------------------------------------------------------------------------
def validated(folder):
    return [row["step"] for row in read_metrics(RunFolder(folder)) if row["kind"] == "valid"]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [(Fraction(7), [7, 14, 21]), (Fraction(15, 2), [8, 15, 23]), (Fraction(2), [6, 12, 18, 24]),
     (Fraction(1, 3), [5, 10, 15, 20, 25])],
)  # fmt: skip
def test_passes_end_where_their_samples_do(steps, expected):
    assert [done for done in range(1, 26) if completes_pass(done, steps)] == expected


class Epochs(Tiny):
    name = "epochs"
    defaults = replace(Tiny.defaults, max_steps=None, epochs=3)

    def datasets(self):
        return Datasets(Rows(100), Rows(10))


@pytest.mark.parametrize("accumulate", [1, 4])
def test_an_own_task_is_validated_after_each_epoch(tmp_path, accumulate):
    """100 samples in batches of 16: epochs end in steps 7, 13 and 19, the last one: 304 samples."""
    settings = {"results_dir": str(tmp_path), "hw": "cpu", "accumulate": accumulate}
    run = tpukit.fit(Epochs(), log=lambda line: None, **settings)
    assert (run.steps, validated(tmp_path)) == (19, [7, 13, 19])


def test_a_time_limit_is_validated(tmp_path):
    result, _ = fit(
        Epochs(pause=0.1, samples=100), tmp_path / "run", max_steps=1000, max_time=2, accumulate=1,
        ckpt_every=1000,
    )  # fmt: skip
    assert not result.finished and validated(tmp_path / "run") == [result.steps]
    assert result.best["step"] == result.steps
    best = (tmp_path / "run" / "checkpoints" / "best").read_text().strip()
    assert best == f"step-{result.steps:08d}"


def test_a_signal_is_not_validated(tmp_path):
    with pytest.raises(InterruptedRunError):
        fit(Dropping(stop_at=9), tmp_path / "run", ckpt_every=1000)
    assert validated(tmp_path / "run") == []


# -- defaults on a CPU ---------------------------------------------------------------------------
def requested(kind, **settings):
    from tpukit.api import _settings

    options = {"hw": "cpu", **settings}
    return _settings(options, options.pop("preset", None), None).request("eit", kind)


def test_eit_on_a_cpu_is_the_quick_one_unless_a_size_is_given():
    chosen = requested("cpu")
    assert (chosen.task.settings.size, chosen.config.max_steps) == ("tiny", 1500)
    assert chosen.remarks() == ["On a CPU the default is --preset quick (size tiny)."]
    for kind, settings in [("tpu", {}), ("gpu", {}), (None, {}), ("cpu", {"size": "published"})]:
        other = requested(kind, **settings)
        assert (other.task.settings.size, other.remarks()) == ("published", [])
    assert requested("cpu", preset="safe").task.settings.size == "published"
