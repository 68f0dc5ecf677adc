"""Predictions beside trials that are measured on this machine's TPU or GPU."""

import dataclasses
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

from tpukit.errors import HardwareError, JobError, TpukitError
from tpukit.hardware.detect import Hardware, detect_hardware, query_driver
from tpukit.hardware.host import Host
from tpukit.hardware.options import HardwareOptions
from tpukit.hardware.select import find_kind, rank_count
from tpukit.probe.compiler.client import find_client
from tpukit.probe.roofline import estimate_step
from tpukit.probe.targets import GpuTarget, Target, find_any, find_target, gpu_here
from tpukit.probe.trial import Prediction, TaskSource, Trial, TrialRequest
from tpukit.probe.trials.evaluators import (
    ChildEvaluator,
    CompilerEvaluator,
    MeasuredEvaluator,
    TracedEvaluator,
    predicting_evaluator,
)
from tpukit.train.config import TrainConfig

PREDICTION_SECONDS = 600.0
"""Time limit of one prediction: measuring goes on without it."""
SLICES = "/proc/driver/nvidia/capabilities/gpu{}/mig"
"""Folder of a GPU's slices: gi1, gi2, ..."""
CUDA_MEMORY = (sys.executable, "-c", "import torch; print(torch.cuda.mem_get_info()[1])")
CUDA_SECONDS = 60.0


def target_here(options: HardwareOptions) -> Target | GpuTarget | None:
    """The devices that a run would use, as a target; None where nothing predicts for them."""
    host = Host()
    hardware, kind = detect_hardware(host), find_kind(options)
    if kind == "gpu":
        gpus = query_driver(host, hardware.gpus)
        name, memory = (gpus[0].name, gpus[0].memory_bytes) if gpus else ("", None)
        if gpus and any(n.startswith("gi") for n in host.names(SLICES.format(gpus[0].index))):
            # The driver reports the whole GPU, and a process has one slice of it (MIG).
            name, memory = "a slice", int(host.run(CUDA_MEMORY, CUDA_SECONDS) or 0)
        return gpu_here(name, rank_count(options, kind), memory) if memory else None
    return _tpu_here(options, hardware) if kind == "tpu" and not hardware.emulated else None


def _tpu_here(options: HardwareOptions, hardware: Hardware) -> Target | None:
    """None where the compiler does not know the TPU, or is not installed in its versions (with
    torch_tpu it is not)."""
    tpu = hardware.tpu
    if tpu is None or tpu.generation is None or tpu.generation.compiler is None:
        return None
    compiler = tpu.generation.compiler
    count = int((options.devices or tpu.devices) / compiler.devices_per_count)
    if count not in compiler.topologies:
        return None
    try:
        find_client()
    except HardwareError:
        return None
    return find_target(f"{tpu.generation.name}-{count}")


class PredictedBeside(AbstractContextManager["PredictedBeside"]):
    """Runs trials on this machine and predicts the same ones: meanwhile where the TPU compiler does
    so at full effort, afterwards for GPUs, whose host has little to spare.

    A prediction that fails ends the predictions with one line, never the trials.
    """

    target = None
    on_cpu = by_speed = False

    def __init__(
        self,
        measured: MeasuredEvaluator,
        predicting: CompilerEvaluator | TracedEvaluator,
        log: Callable[[str], None],
    ) -> None:
        self.measured = measured
        self.predicting: CompilerEvaluator | TracedEvaluator | None = predicting
        self.of_gpu = isinstance(predicting.target, GpuTarget)
        self.log = log
        self.versions: Mapping[str, str] = predicting.versions
        # The compiler's process ends with the thread that starts it: one for all trials.
        self._thread = ThreadPoolExecutor(1)

    @property
    def devices(self) -> int:
        return self.measured.devices

    def evaluate(self, request: TrialRequest) -> Trial:
        """The measured trial with its prediction, in `predicted`."""
        if self.of_gpu:
            trial = self.measured.evaluate(request)
        future = self._thread.submit(self._predict, request)
        if not self.of_gpu:
            trial = self.measured.evaluate(request)
        return _beside(trial, future.result(), knows_peak=self.of_gpu)

    def _predict(self, request: TrialRequest) -> Prediction | None:
        if self.predicting is None:
            return None
        try:
            trial = self.predicting.evaluate(dataclasses.replace(request, effort="full"))
            if trial.slow:
                raise JobError(f"batch {trial.batch}: {trial.error}.")
        except TpukitError as error:
            self.predicting.close()
            self.predicting = None
            self.log(f"No predictions: {error.message}")
            return None
        target = self.predicting.target
        assert target is not None
        return _prediction(target, trial)

    def __exit__(self, *_: object) -> None:
        if self.predicting is not None:
            self.predicting.close()
        self._thread.shutdown()
        self.measured.close()


def _beside(trial: Trial, prediction: Prediction | None, *, knows_peak: bool) -> Trial:
    """The trial with its prediction and, unless the device knows its peak, the larger one of the
    two memory usages: under SPMD a TPU reports none, and samples may miss it."""
    if prediction is None:
        return trial
    predicted = dataclasses.replace(prediction, measured_bytes=trial.used_bytes)
    used, limit = trial.used_bytes, trial.limit_bytes
    if trial.fits and prediction.fits and prediction.used_bytes and not knows_peak:
        used = max(used or 0, prediction.used_bytes)
        limit = limit or prediction.limit_bytes
    return dataclasses.replace(trial, predicted=predicted, used_bytes=used, limit_bytes=limit)


def _prediction(target: Target | GpuTarget, trial: Trial) -> Prediction:
    step = estimate_step(target, trial) if trial.fits else None
    used, limit = trial.used_bytes, trial.limit_bytes
    if isinstance(target, GpuTarget) and used and limit and trial.memory:
        # A measured trial's memory is the allocator's.
        beside = trial.memory["context"] + trial.memory["nccl"]
        used, limit = used - beside, limit - beside
    return Prediction(target.name, trial.fits, used, limit, step.seconds if step else None)


def open_evaluator(
    source: TaskSource,
    config: TrainConfig,
    target_name: str | None,
    seconds: float | None,
    log: Callable[[str], None],
) -> ChildEvaluator | PredictedBeside:
    """The TPU compiler or a trace for a target; without one trials on this machine, with
    predictions for its GPU, or its TPU where the compiler is."""
    if target_name is not None:
        return predicting_evaluator(source, config, find_any(target_name), seconds, log)
    measured = MeasuredEvaluator(source, config, seconds)
    target = target_here(config)
    if target is None:
        return measured
    predicting = predicting_evaluator(source, config, target, PREDICTION_SECONDS)
    return PredictedBeside(measured, predicting, log)
