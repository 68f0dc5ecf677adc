"""What the TPU compiler predicted for a run's program, kept in the cache: a run logs it first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tpukit.hardware.options import Precision
from tpukit.io.cache import JsonCache, cache_folder
from tpukit.io.units import GIB
from tpukit.train.requests import TrainingRequest

FORMAT = 1
PROGRAM = ("shard", "optimizer", "clip_norm", "ema_decay")
"""Settings of the training that decide its program."""


@dataclass(frozen=True)
class Prediction:
    """One program on one chip; an estimate."""

    target: str
    memory_bytes: int
    limit_bytes: int
    step_seconds: float | None
    """A lower bound."""
    effort: str
    """The compiler's: fast or full."""
    libtpu: str
    measured: Mapping[str, float] | None = None
    """`memory_bytes` and `step_seconds` of the same program on a TPU."""

    def describe(self) -> str:
        """The line at a run's start."""
        memory = f"{self.memory_bytes / GIB:.2f} of {self.limit_bytes / GIB:.2f} GiB a chip"
        step = f", at least {self.step_seconds:.3g} s a step" if self.step_seconds else ""
        source = f"the TPU compiler, libtpu {self.libtpu}"
        return f"Predicted for {self.target} ({source}): {memory}{step}"


@dataclass(frozen=True)
class RunProgram:
    """What decides the program of a run, or of a trial of its settings."""

    task: str
    settings: Mapping[str, Any]
    training: Mapping[str, Any]
    precision: Precision
    devices: int
    batch: int
    """Samples a device and micro-batch."""
    accumulate: int

    @property
    def key(self) -> dict[str, Any]:
        """Where its predictions lie in the cache."""
        return asdict(self)


def run_program(
    request: TrainingRequest, precision: Precision, devices: int, batch: int, accumulate: int
) -> RunProgram:
    """The program of these settings on a number of devices."""
    config = request.config
    training = {name: getattr(config, name) for name in PROGRAM}
    training["kernels"] = config.kernels != "off"
    settings = {n: v for n, v in request.task_settings.items() if n != "data_path"}
    source = type(request.task).source or request.task.name
    return RunProgram(source, settings, training, precision, devices, batch, accumulate)


def add_prediction(program: RunProgram, prediction: Prediction) -> None:
    """Keeps a prediction beside those for other targets; one at full effort stays."""
    kept = {one.target: one for one in predictions_of(program)}
    known = kept.get(prediction.target)
    if known is None or prediction.effort == "full" or known.effort == "fast":
        kept[prediction.target] = prediction
        _cache().write(program.key, {name: asdict(one) for name, one in kept.items()})


def predictions_of(program: RunProgram) -> Iterator[Prediction]:
    """The predictions of a program, a target each."""
    for fields in (_cache().read(program.key) or {}).values():
        yield Prediction(**fields)


def _cache() -> JsonCache:
    return JsonCache(cache_folder() / "predictions", FORMAT)
