"""Trials of the batch search: measured ones beside what the TPU compiler says, and a killed one."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any, Literal

from tpukit.hardware.options import HardwareOptions
from tpukit.hardware.select import settle_kernels
from tpukit.io.units import GIB
from tpukit.probe.batch.recommend import Recommender
from tpukit.probe.batch.search import SearchSettings
from tpukit.probe.selftest.answering_parts import MEMORY_UNKNOWN
from tpukit.probe.targets import Target
from tpukit.probe.trial import TASK_FACTORY, TaskSource, Trial, TrialRequest
from tpukit.probe.trials.evaluators import CompilerEvaluator, MeasuredEvaluator
from tpukit.probe.trials.predicted_trials import PREDICTION_SECONDS, PredictedBeside, target_here
from tpukit.train.config import TrainConfig

CLOSE = 0.25
"""Largest deviation from the predicted memory without a warning, as a part of it."""
Hw = Literal["auto", "tpu", "gpu", "cpu"]


def _log(line: str) -> None:
    print(line, flush=True)


def _setup(
    hw: Hw, task: str, settings: Mapping[str, Any]
) -> tuple[TaskSource, TrainConfig, Target | None]:
    config = settle_kernels(TrainConfig(hw=hw), _log)
    source = TaskSource(TASK_FACTORY, {"spec": task, "settings": settings, "data_path": ""})
    return source, config, target_here(HardwareOptions(hw))


NOT_HERE = {
    "message": "no TPU that the compiler knows, or no compiler (the extra [plan])",
    "skip": True,
}


def measure_beside_prediction(
    hw: Hw, task: str, settings: Mapping[str, Any], batch: int, target: Target | None = None
) -> dict[str, Any]:
    """The answer of the self-test's part. target: another one than this machine's, for tests."""
    source, config, here = _setup(hw, task, settings)
    if (target := target or here) is None:
        return dict(NOT_HERE)
    measured = MeasuredEvaluator(source, config, PREDICTION_SECONDS)
    compiled = CompilerEvaluator(source, config, target, PREDICTION_SECONDS)
    with PredictedBeside(measured, compiled, _log) as evaluator:
        [trial] = evaluator.evaluate([TrialRequest(batch)])
    return _beside(trial)


def _beside(trial: Trial) -> dict[str, Any]:
    predicted = trial.predicted
    if predicted is None:
        return {"error": "the compiler gave no prediction", "fix": "tpukit doctor --quick"}
    used = predicted.measured_bytes
    values = {"batch": trial.batch, "fits": trial.fits, "used_bytes": used,
              "step_seconds": trial.step_seconds, "predicted": asdict(predicted)}  # fmt: skip
    text = f"batch {trial.batch} a device: measured {_pair(used, trial.step_seconds)}"
    text += f"; predicted {_pair(predicted.used_bytes, predicted.step_seconds, 'at least ')}"
    answer: dict[str, Any] = {"message": text, "values": values}
    expected = predicted.used_bytes or 0
    if trial.fits and used is None:
        answer["warning"] = MEMORY_UNKNOWN
    elif trial.fits != predicted.fits or (used and abs(used - expected) > CLOSE * expected):
        answer["warning"] = "Memory is not what was predicted: leave more of it free (--margin)."
    return answer


def _pair(used: int | None, seconds: float | None, least: str = "") -> str:
    memory = f"{used / GIB:.2f} GiB" if used else "unknown memory"
    return f"{memory}, {least}{seconds:.3g} s a step" if seconds else memory


def try_largest(
    hw: Hw, task: str, settings: Mapping[str, Any], target: Target | None = None
) -> dict[str, Any]:
    """The largest batch by the compiler and the next one, which it says does not fit."""
    source, config, here = _setup(hw, task, settings)
    if (target := target or here) is None:
        return dict(NOT_HERE)
    search = SearchSettings(exact=True, start=64)
    with ExitStack() as stack:
        compiled = stack.enter_context(CompilerEvaluator(source, config, target, None))
        found = Recommender(compiled, search, _log).recommend()
    batches = [batch for batch in (found.largest, found.smallest_failed) if batch]
    with MeasuredEvaluator(source, config, None) as measured:
        trials = measured.evaluate([TrialRequest(batch) for batch in batches])
    values = {str(trial.batch): {"fits": trial.fits, "used_bytes": trial.used_bytes}
              for trial in trials}  # fmt: skip
    text = ", ".join(f"{t.batch} {'fits' if t.fits else 'does not fit'}" for t in trials)
    answer = {"message": f"named {found.largest} a device: {text}", "values": values}
    if [trial.fits for trial in trials] != [True, False][: len(trials)]:
        answer["warning"] = "The compiler's limit is not this TPU's: use probe-batch --hw tpu."
    return answer


def search_past_a_kill(hw: Hw) -> dict[str, Any]:
    """Two samples a device, four whose process is killed with the device open, and two again."""
    source = TaskSource("tpukit.probe.selftest.selftest_task:SelfTestTask", {"kill_above": 2})
    with MeasuredEvaluator(source, TrainConfig(hw=hw, kernels="off"), None) as measured:
        trials = [measured.evaluate([TrialRequest(batch)])[0] for batch in (2, 4, 2)]
    text = ", ".join(f"{t.batch} {'fits' if t.fits else t.error}" for t in trials)
    seconds = [round(trial.seconds, 1) for trial in trials]
    answer: dict[str, Any] = {"message": text, "values": {"seconds": seconds}}
    if [trial.fits for trial in trials] != [True, False, True]:
        return {**answer, "error": text, "fix": ""}
    return answer
