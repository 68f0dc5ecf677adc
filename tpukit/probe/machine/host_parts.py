"""Parts of the self-test whose own child processes open the device: kernels, the batch search."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from tpukit.hardware.options import HardwareOptions
from tpukit.hardware.select import settled, try_own_kernels
from tpukit.io.units import GIB
from tpukit.probe.batch.recommend import Recommender
from tpukit.probe.batch.search import SearchSettings
from tpukit.probe.trial import MEMORY_UNKNOWN, TASK_FACTORY, TaskSource, Trial, TrialRequest
from tpukit.probe.trials.evaluators import MeasuredEvaluator, predicting_evaluator
from tpukit.probe.trials.predicted_trials import PREDICTION_SECONDS, PredictedBeside, target_here
from tpukit.train.config import TrainConfig

CLOSE = 0.25
"""Largest deviation from the predicted memory without a warning, as a part of it."""


Answer = dict[str, Any]
NOT_HERE = {
    "message": "no GPU, and no TPU that the compiler knows or no compiler (the extra [plan])",
    "skip": True,
}


def _log(line: str) -> None:
    print(line, flush=True)


class HostParts:
    """Parts whose own child processes open the device."""

    def __init__(self, hw: Any) -> None:
        self.hw = hw

    def kernels(self, seconds: float) -> Answer:
        """Each kernel against plain operations, tried afresh; the result is kept for runs."""
        result = try_own_kernels(HardwareOptions(self.hw), seconds)
        if result is None:
            return {"message": "there are no kernels for this hardware", "skip": True}
        if not result["works"]:
            fix = "Runs use plain attention here: send the report (docs/first_tpu.md)."
            return {"error": result["reason"], "fix": fix, "values": result["errors"]}
        largest = max(result["errors"].values())
        forms = len({name.partition(":")[0] for name in result["errors"]})
        message = f"{forms} forms, forward and backward, differ by at most {largest:.1e}"
        return {"message": message, "values": result["errors"]}

    def prediction(self, task: str, settings: Mapping[str, Any], batch: int) -> Answer:
        """Memory and time of a step, measured here, beside what was predicted for it."""
        if (target := target_here(HardwareOptions(self.hw))) is None:
            return dict(NOT_HERE)
        source, config = self._setup(task, settings)
        measured = MeasuredEvaluator(source, config, PREDICTION_SECONDS)
        predicting = predicting_evaluator(source, config, target, PREDICTION_SECONDS)
        with PredictedBeside(measured, predicting, _log) as evaluator:
            trial = evaluator.evaluate(TrialRequest(batch))
        return _beside(trial)

    def largest(self, task: str, settings: Mapping[str, Any]) -> Answer:
        """The largest batch that is predicted to fit, and the next one, which is not."""
        if (target := target_here(HardwareOptions(self.hw))) is None:
            return dict(NOT_HERE)
        source, config = self._setup(task, settings)
        search = SearchSettings(exact=True, start=64)
        with predicting_evaluator(source, config, target, None) as predicting:
            found = Recommender(predicting, search, _log).recommend()
        batches = [batch for batch in (found.largest, found.smallest_failed) if batch]
        with MeasuredEvaluator(source, config, None) as measured:
            trials = [measured.evaluate(TrialRequest(batch)) for batch in batches]
        values = {str(trial.batch): {"fits": trial.fits, "used_bytes": trial.used_bytes}
                  for trial in trials}  # fmt: skip
        text = ", ".join(f"{t.batch} {'fits' if t.fits else 'does not fit'}" for t in trials)
        answer = {"message": f"named {found.largest} a device: {text}", "values": values}
        if [trial.fits for trial in trials] != [True, False][: len(trials)]:
            answer["warning"] = "The predicted limit is not this device's: measure (--hw)."
        return answer

    def reopen(self) -> Answer:
        """Two samples a device, four whose process is killed with the device open, two again."""
        source = TaskSource("tpukit.probe.machine.selftest_task:SelfTestTask", {"kill_above": 2})
        with MeasuredEvaluator(source, TrainConfig(hw=self.hw, kernels="off"), None) as measured:
            trials = [measured.evaluate(TrialRequest(batch)) for batch in (2, 4, 2)]
        text = ", ".join(f"{t.batch} {'fits' if t.fits else t.error}" for t in trials)
        seconds = [round(trial.seconds, 1) for trial in trials]
        answer: Answer = {"message": text, "values": {"seconds": seconds}}
        if [trial.fits for trial in trials] != [True, False, True]:
            return {**answer, "error": text, "fix": ""}
        return answer

    def _setup(self, task: str, settings: Mapping[str, Any]) -> tuple[TaskSource, TrainConfig]:
        config = settled(TrainConfig(hw=self.hw), _log)
        arguments = {"spec": task, "settings": settings, "data_path": ""}
        return TaskSource(TASK_FACTORY, arguments), config


def _beside(trial: Trial) -> dict[str, Any]:
    predicted = trial.predicted
    if predicted is None:
        return {"error": "nothing was predicted", "fix": "tpukit doctor --quick"}
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
