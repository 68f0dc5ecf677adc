"""Predictions of the TPU compiler beside measured trials."""

import dataclasses
from pathlib import Path

import pytest

from tpukit.hardware.detect import Hardware, TpuChips
from tpukit.hardware.options import HardwareOptions
from tpukit.io.folders import cache_folder
from tpukit.knowledge.accelerators import tpu_by_cloud_name
from tpukit.probe.compiler.client import find_client
from tpukit.probe.targets import find_target
from tpukit.probe.trial import TaskSource, Trial, TrialRequest
from tpukit.probe.trials import predicted_trials as predictions
from tpukit.probe.trials.evaluators import CompilerEvaluator, MeasuredEvaluator
from tpukit.train.config import TrainConfig

SUPPORT = Path(__file__).parents[2] / "support"


def source(name: str) -> TaskSource:
    spec = {"spec": f"{SUPPORT / 'probe_tasks.py'}:{name}", "settings": {}, "data_path": ""}
    return TaskSource("tpukit.registry.classes:load_task", spec)


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """A cache folder without reports; the compiler's own jax, where it has one, stays."""
    installed = cache_folder() / "compiler"
    installed.mkdir(parents=True, exist_ok=True)
    (tmp_path / "compiler").symlink_to(installed)
    monkeypatch.setenv("TPUKIT_CACHE_DIR", str(tmp_path))
    find_client(print)


@pytest.mark.plan
@pytest.mark.usefixtures("own_cache")
def test_a_measured_trial_has_the_prediction_beside_it():
    config, task, said = TrainConfig(hw="cpu"), source("Hungry"), []
    measured = MeasuredEvaluator(task, config, None)
    compiled = CompilerEvaluator(task, config, find_target("v5e-1"), None)
    with predictions.PredictedBeside(measured, compiled, said.append) as evaluator:
        [trial] = evaluator.evaluate([TrialRequest(2)])
    assert trial.fits
    assert trial.step_seconds == pytest.approx(2 / trial.samples_per_second)
    assert trial.predicted.target == "v5e-1"
    assert trial.predicted.used_bytes > 4 * 1_048_576
    assert trial.predicted.step_seconds > 0
    assert "predicted 0." in trial.describe()
    assert said == []


@pytest.mark.plan
@pytest.mark.usefixtures("own_cache")
def test_a_prediction_that_fails_costs_no_trial():
    config, said = TrainConfig(hw="cpu"), []
    measured = MeasuredEvaluator(source("Hungry"), config, None)
    compiled = CompilerEvaluator(source("Hungry"), config, find_target("v5e-1"), 1.0)
    with predictions.PredictedBeside(measured, compiled, said.append) as evaluator:
        trials = evaluator.evaluate([TrialRequest(2)]) + evaluator.evaluate([TrialRequest(3)])
    assert [(trial.fits, trial.predicted) for trial in trials] == [(True, None)] * 2
    [line] = said
    assert line.startswith("No predictions by the TPU compiler: batch 2")


@pytest.mark.plan
@pytest.mark.parametrize(
    ("chips", "options", "name"),
    [
        (TpuChips(tpu_by_cloud_name("v5e"), 8), {}, "v5e-8"),
        (TpuChips(tpu_by_cloud_name("v5e"), 8), {"devices": 4}, "v5e-4"),
        (TpuChips(tpu_by_cloud_name("v3"), 4), {}, "v3-8"),
        (TpuChips(tpu_by_cloud_name("v5e"), 5), {}, None),
        (TpuChips(None, 8), {}, None),
        (None, {}, None),
    ],
)
def test_the_target_is_the_tpu_that_is_here(monkeypatch, chips, options, name):
    hardware = Hardware("tpu", chips, (), 0, emulated=False)
    monkeypatch.setattr(predictions, "detect_hardware", lambda _: hardware)
    monkeypatch.setattr(predictions, "find_kind", lambda _: "tpu")
    found = predictions.target_here(HardwareOptions(**options))
    assert (found and found.name) == name
    emulated = dataclasses.replace(hardware, emulated=True)
    monkeypatch.setattr(predictions, "detect_hardware", lambda _: emulated)
    assert predictions.target_here(HardwareOptions(**options)) is None


@pytest.mark.parametrize(
    ("sampled", "taken"), [(None, 12), (3, 12), (13, 13)], ids=["none", "missed", "seen"]
)
def test_memory_that_a_device_does_not_tell_is_the_compilers(sampled, taken):
    class Answers:
        def __init__(self, **found):
            self.trial, self.versions = Trial(4, fits=True, **found), {}
            self.target = find_target("v5e-1")

        def evaluate(self, requests):
            return [self.trial]

        def close(self):
            pass

    measured = Answers(used_bytes=sampled and sampled * 2**30)
    compiled = Answers(used_bytes=12 * 2**30, limit_bytes=16 * 2**30)
    with predictions.PredictedBeside(measured, compiled, print) as evaluator:
        [trial] = evaluator.evaluate([TrialRequest(4)])
    assert trial.used_bytes == taken * 2**30
    assert trial.limit_bytes == 16 * 2**30
    assert trial.predicted.measured_bytes == (sampled and sampled * 2**30)
    assert not trial.leaves_margin(0.3)
