"""Predictions of the TPU compiler, and of a trace for a GPU, beside measured trials."""

import dataclasses
import sys

import pytest
from runs import SUPPORT, printed, script

from tpukit.hardware.detect import Gpu, Hardware, TpuChips
from tpukit.hardware.options import HardwareOptions
from tpukit.io.folders import cache_folder
from tpukit.knowledge.accelerators import tpu_by_cloud_name
from tpukit.probe.compiler.client import find_client
from tpukit.probe.targets import find_gpu, find_target
from tpukit.probe.trial import TaskSource, Trial, TrialRequest
from tpukit.probe.trials import predicted_trials as predictions
from tpukit.probe.trials.evaluators import (
    CompilerEvaluator,
    MeasuredEvaluator,
    TracedEvaluator,
)
from tpukit.train.config import TrainConfig


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
@pytest.mark.parametrize(
    "name", [pytest.param("is_compiled", marks=pytest.mark.slow), "is_not_compiled_in_time"]
)
def test_a_measured_trial_has_the_compilers_prediction_where_there_is_one(name):
    in_forks(name)


def in_forks(name):
    """A function of this file, whose trials and compilers are forks of a warm process."""
    printed(script("called.py", __file__, name, env={"TPUKIT_CACHE_DIR": str(cache_folder())}))


def is_compiled():
    config, task, said = TrainConfig(hw="cpu"), source("Hungry"), []
    measured = MeasuredEvaluator(task, config, None)
    compiled = CompilerEvaluator(task, config, find_target("v5e-1"), None)
    with predictions.PredictedBeside(measured, compiled, said.append) as evaluator:
        trial = evaluator.evaluate(TrialRequest(2))
    assert trial.fits
    assert trial.step_seconds == pytest.approx(2 / trial.samples_per_second)
    assert trial.predicted.target == "v5e-1"
    assert trial.predicted.used_bytes > 4 * 1_048_576
    assert trial.predicted.step_seconds > 0
    assert "predicted 0." in trial.describe()
    assert said == []


def is_not_compiled_in_time():
    """A prediction that fails costs no trial."""
    config, said = TrainConfig(hw="cpu"), []
    measured = MeasuredEvaluator(source("Hungry"), config, None)
    compiled = CompilerEvaluator(source("Hungry"), config, find_target("v5e-1"), 1.0)
    with predictions.PredictedBeside(measured, compiled, said.append) as evaluator:
        trials = [evaluator.evaluate(TrialRequest(n)) for n in (2, 3)]
    assert [(trial.fits, trial.predicted) for trial in trials] == [(True, None)] * 2
    [line] = said
    assert line.startswith("No predictions: batch 2")


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


def test_a_measured_trial_has_a_gpus_prediction_beside_it():
    in_forks("is_traced")


def is_traced():
    """What the allocator reserves, as a GPU's is measured: without CUDA's context."""
    config, task, t4 = TrainConfig(hw="cpu", precision="fp32"), source("Hungry"), find_gpu("t4")
    with predictions.PredictedBeside(
        MeasuredEvaluator(task, config, None), TracedEvaluator(task, config, t4, None), print
    ) as evaluator:
        trial = evaluator.evaluate(TrialRequest(2))
    with TracedEvaluator(task, config, t4, None) as traced:
        alone = traced.evaluate(TrialRequest(2))
    beside = sum(t4.context_bytes) // 2
    found = trial.predicted
    assert (found.target, found.used_bytes) == ("t4", alone.used_bytes - beside)
    assert found.limit_bytes == t4.memory_bytes - beside
    assert found.step_seconds > 0
    # The device knows its peak.
    assert found.measured_bytes == trial.used_bytes > 0


@pytest.mark.parametrize(
    ("name", "gib", "devices", "target"),
    [("Tesla T4", 15, 2, "2xt4"), ("NVIDIA A100-SXM4-80GB", 80, 1, "a100-80"),
     ("NVIDIA A100-SXM4-40GB", 40, 1, "a100-40"), ("NVIDIA A10G", 22.5, 1, "a10g"),
     ("NVIDIA Unheard Of", 24, 1, "1x24.00GiB"), ("Tesla T4", None, 1, None)],
)  # fmt: skip
def test_the_target_is_the_gpus_that_are_here(monkeypatch, name, gib, devices, target):
    gpus = tuple(Gpu(n, name, gib and int(gib * 2**30)) for n in range(2))
    hardware = Hardware("gpu", None, gpus, 0, emulated=False)
    monkeypatch.setattr(predictions, "detect_hardware", lambda _: hardware)
    monkeypatch.setattr(predictions, "query_driver", lambda _, gpus: gpus)
    monkeypatch.setattr(predictions, "find_kind", lambda _: "gpu")
    found = predictions.target_here(HardwareOptions(devices=devices))
    assert (found and found.name) == target


def test_a_slice_of_a_gpu_has_the_memory_that_cuda_reports(monkeypatch, tmp_path):
    """nvidia-smi names the whole GPU."""
    gpus = (Gpu(0, "NVIDIA A100-SXM4-40GB", 40 * 2**30),)
    hardware = Hardware("gpu", None, gpus, 0, emulated=False)
    monkeypatch.setattr(predictions, "detect_hardware", lambda _: hardware)
    monkeypatch.setattr(predictions, "query_driver", lambda _, gpus: gpus)
    monkeypatch.setattr(predictions, "find_kind", lambda _: "gpu")
    (tmp_path / "gi7").mkdir()
    monkeypatch.setattr(predictions, "SLICES", f"{tmp_path}")
    told = (sys.executable, "-c", f"print({5 * 2**30})")
    monkeypatch.setattr(predictions, "CUDA_MEMORY", told)
    found = predictions.target_here(HardwareOptions(devices=1))
    assert found and found.memory_bytes == 5 * 2**30
    monkeypatch.setattr(predictions, "CUDA_MEMORY", (sys.executable, "-c", "1 / 0"))
    assert predictions.target_here(HardwareOptions(devices=1)) is None


@pytest.mark.parametrize(
    ("sampled", "taken"), [(None, 12), (3, 12), (13, 13)], ids=["none", "missed", "seen"]
)
def test_memory_that_a_device_does_not_tell_is_the_compilers(sampled, taken):
    class Answers:
        def __init__(self, **found):
            self.trial, self.versions = Trial(4, fits=True, **found), {}
            self.target = find_target("v5e-1")

        def evaluate(self, request):
            return self.trial

        def close(self):
            pass

    measured = Answers(used_bytes=sampled and sampled * 2**30)
    compiled = Answers(used_bytes=12 * 2**30, limit_bytes=16 * 2**30)
    with predictions.PredictedBeside(measured, compiled, print) as evaluator:
        trial = evaluator.evaluate(TrialRequest(4))
    assert trial.used_bytes == taken * 2**30
    assert trial.limit_bytes == 16 * 2**30
    assert trial.predicted.measured_bytes == (sampled and sampled * 2**30)
    assert not trial.leaves_margin(0.3)
