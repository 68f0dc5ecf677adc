"""Predictions of the TPU compiler beside trials that are measured on this machine's TPU."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Self

from tpukit.errors import HardwareError, JobError, TpukitError
from tpukit.hardware.detect import detect_hardware
from tpukit.hardware.host import Host
from tpukit.hardware.options import HardwareOptions
from tpukit.hardware.select import find_kind
from tpukit.probe.compiler.client import find_client
from tpukit.probe.roofline import estimate_step
from tpukit.probe.targets import Target, find_target
from tpukit.probe.trial import Prediction, TaskSource, Trial, TrialRequest
from tpukit.probe.trials.evaluators import CompilerEvaluator, MeasuredEvaluator
from tpukit.train.config import TrainConfig

PREDICTION_SECONDS = 600.0
"""Time limit of one prediction: measuring goes on without it."""


def target_here(options: HardwareOptions) -> Target | None:
    """The TPU that a run would use, as the compiler's target.

    None where there is none, the compiler does not know it, or is not installed in its versions;
    with torch_tpu, whose programs are recorded on a TPU that is not there.
    """
    hardware = detect_hardware(Host())
    tpu = None if hardware.emulated or find_kind(options) != "tpu" else hardware.tpu
    if tpu is None or tpu.generation is None or tpu.generation.compiler is None:
        return None
    compiler = tpu.generation.compiler
    count = int((options.devices or tpu.devices) / compiler.devices_per_count)
    if count not in compiler.topologies:
        return None
    try:
        if find_client().stack == "torch_tpu":
            return None
    except HardwareError:
        return None
    return find_target(f"{tpu.generation.name}-{count}")


class PredictedBeside:
    """Runs trials on this machine and, meanwhile, compiles the same ones at full effort.

    A prediction that fails ends the predictions with one line, never the trials.
    """

    target = None
    on_cpu = by_speed = False

    def __init__(
        self,
        measured: MeasuredEvaluator,
        compiled: CompilerEvaluator,
        log: Callable[[str], None],
    ) -> None:
        self.measured = measured
        self.compiled: CompilerEvaluator | None = compiled
        self.log = log
        self.versions: Mapping[str, str] = compiled.versions
        # The compiler's process ends with the thread that starts it: one for all trials.
        self._thread = ThreadPoolExecutor(1)

    @property
    def devices(self) -> int:
        return self.measured.devices

    def evaluate(self, requests: Sequence[TrialRequest]) -> list[Trial]:
        """The measured trials, with `predicted` in each."""
        future = self._thread.submit(self._predict, requests)
        trials = self.measured.evaluate(requests)
        predictions = future.result()
        return [_beside(*pair) for pair in zip(trials, predictions, strict=True)]

    def _predict(self, requests: Sequence[TrialRequest]) -> list[Prediction | None]:
        if self.compiled is None:
            return [None] * len(requests)
        full = [dataclasses.replace(request, effort="full") for request in requests]
        try:
            trials = self.compiled.evaluate(full)
            if slow := next((trial for trial in trials if trial.slow), None):
                raise JobError(f"batch {slow.batch}: {slow.error}.")
        except TpukitError as error:
            self.compiled.close()
            self.compiled = None
            self.log(f"No predictions by the TPU compiler: {error.message}")
            return [None] * len(requests)
        target = self.compiled.target
        assert isinstance(target, Target)
        return [_prediction(target, trial) for trial in trials]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.compiled is not None:
            self.compiled.close()
        self._thread.shutdown()
        self.measured.close()


def _beside(trial: Trial, prediction: Prediction | None) -> Trial:
    """The trial with its prediction, and the larger one of the two memory usages.

    Under SPMD a TPU reports no peak, and samples may miss it.
    """
    if prediction is None:
        return trial
    predicted = dataclasses.replace(prediction, measured_bytes=trial.used_bytes)
    used, limit = trial.used_bytes, trial.limit_bytes
    if trial.fits and prediction.fits and prediction.used_bytes:
        used = max(used or 0, prediction.used_bytes)
        limit = limit or prediction.limit_bytes
    return dataclasses.replace(trial, predicted=predicted, used_bytes=used, limit_bytes=limit)


def _prediction(target: Target, trial: Trial) -> Prediction:
    step = estimate_step(target, trial) if trial.fits else None
    seconds = step.seconds if step else None
    return Prediction(target.name, trial.fits, trial.used_bytes, trial.limit_bytes, seconds)


def measured_evaluator(
    source: TaskSource,
    config: TrainConfig,
    seconds: float | None,
    log: Callable[[str], None],
) -> MeasuredEvaluator | PredictedBeside:
    """Trials on this machine, with predictions where it has a TPU and the compiler."""
    measured = MeasuredEvaluator(source, config, seconds)
    target = target_here(config)
    if target is None:
        return measured
    compiled = CompilerEvaluator(source, config, target, PREDICTION_SECONDS)
    return PredictedBeside(measured, compiled, log)
