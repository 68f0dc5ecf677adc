"""One trial of one batch size: the request that a child process gets, and the result it sends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tpukit.errors import JobError
from tpukit.io.units import GIB, format_bytes, three_digits
from tpukit.train.config import TrainConfig

Effort = Literal["fast", "full"]
Verdict = Literal["grow", "fine", "near", "over", "slow"]

TASK_FACTORY = "tpukit.registry.classes:load_task"
"""Builds a task that is named, with its settings and its data path."""
COMPILER_MEMORY = "compiler-memory"
"""Id of the error that this machine has too little memory to compile a trial."""
MEMORY_UNKNOWN = (
    "The device does not report its memory: probe-batch goes by what the TPU compiler says."
)
TIMED_STEPS = 3
"""Maximum number of timed steps of a measured trial."""
LONG_ENOUGH_SECONDS = 1.0
"""Seconds of timed steps after which the rate is certain enough."""
UNTIMED_STEPS = 1.5
"""Duration of a trial's first step, evaluation and copies, in steps."""


@dataclass(frozen=True)
class TaskSource:
    """How a child process builds the task: a function by its place, and its arguments."""

    factory: str
    """`package.module:function`."""
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class TrialSetup:
    """What all trials of a search share."""

    task: TaskSource
    config: TrainConfig
    target: str | None = None
    """TPU to compile for; None: measure on this machine."""
    world_size: int = 1
    """Ranks of a measured trial."""

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> TrialSetup:
        """The setup from the fields of `dataclasses.asdict`."""
        task, config = TaskSource(**fields["task"]), TrainConfig(**fields["config"])
        return cls(task, config, fields["target"], fields["world_size"])


@dataclass(frozen=True)
class TrialRequest:
    """One batch size to try."""

    batch: int
    """Samples a device and micro-batch."""
    accumulate: int = 1
    """Gradient accumulation steps."""
    form: int = 0
    """Place of the task's form among its `forms`."""
    effort: Effort = "fast"
    """How hard the TPU compiler optimizes; measured trials ignore it."""
    evaluate: bool = True
    """Compile the evaluation program too, at full effort."""
    fitted: int = 0
    """Largest batch that has fitted: ambiguous failures of larger ones count as out of memory."""


@dataclass(frozen=True)
class Prediction:
    """What the TPU compiler, or a trace for a GPU, predicts for a measured trial."""

    target: str
    fits: bool
    used_bytes: int | None
    limit_bytes: int | None
    step_seconds: float | None
    """Lower bound."""
    measured_bytes: int | None = None
    """The measured memory usage, whose samples may have missed the peak."""

    def describe(self) -> str:
        """`12.40 GiB, at least 0.21 s a step`."""
        memory = f"{self.used_bytes / GIB:.2f} GiB" if self.used_bytes else "an unknown memory"
        if not self.fits:
            return f"{memory}: too much"
        return (
            f"{memory}, at least {self.step_seconds:.3g} s a step" if self.step_seconds else memory
        )


@dataclass(frozen=True)
class Trial:
    """The result of one trial."""

    batch: int
    """Samples a device and micro-batch."""
    fits: bool
    used_bytes: int | None = None
    """Peak memory of one device; of a batch that does not fit, the memory it requested. None:
    unknown (killed by the system, or hung)."""
    limit_bytes: int | None = None
    fixed_bytes: int | None = None
    """The part of `used_bytes` that does not depend on the batch: parameters, optimizer, EMA, and
    in a measured trial what libraries and the run itself hold."""
    samples_per_second: float | None = None
    """Measured, over all devices."""
    seconds: float = 0.0
    """Duration of the trial."""
    error: str | None = None
    """Why it does not fit, in one line."""
    slow: bool = False
    """It gave no result within its time limit: whether it fits is unknown, and `fits` is False."""
    accumulate: int = 1
    memory: Mapping[str, int] | None = None
    """Bytes of one device by kind; see `memory_by_kind`."""
    unread: bool = False
    """Whether the compiler's text of the program took too much of this machine's memory: the
    operations, the collectives and the largest allocations are unknown."""
    flops: float | None = None
    """Operations of one optimizer step on one device, custom kernels' included."""
    kernel_flops: float | None = None
    """The part of `flops` in custom kernels, by formula."""
    bytes_accessed: float | None = None
    """Bytes that one optimizer step moves on one device."""
    collectives: Mapping[str, int] = field(default_factory=dict)
    """Number of each collective in one optimizer step."""
    collective_bytes: int = 0
    largest: Sequence[Mapping[str, Any]] = ()
    """The largest allocations: `size_bytes`, `shape`, `operator`, `place`."""
    effort: Effort | None = None
    """None: a measured trial."""
    cached: bool = False
    compiles: int = 0
    """Programs compiled for this trial."""
    parameters: int | None = None
    """Number of weights of the model."""
    devices: int | None = None
    samples: int | None = None
    """Training samples, where they are known."""
    seen: int | None = None
    """Those whose sizes were compared for the largest; None: all are alike."""
    predicted: Prediction | None = None
    """The prediction for a trial measured on a GPU or TPU. On a TPU `used_bytes` is then the larger
    one of the predicted and the measured memory usage."""

    used_range: Sequence[int] | None = None
    """Least and most that `used_bytes` may be, of a batch predicted for a GPU."""
    allocated_bytes: int | None = None
    """Peak of torch's `max_memory_allocated`, of a batch predicted for a GPU."""
    modules: Mapping[str, int] = field(default_factory=dict)
    """Bytes of activations at the peak by module, of a batch predicted for a GPU."""

    @property
    def step_seconds(self) -> float | None:
        """Measured seconds of one optimizer step."""
        if not self.samples_per_second:
            return None
        return self.batch * self.accumulate * (self.devices or 1) / self.samples_per_second

    def expected_seconds(self, batch: int, accumulate: int = 1) -> float:
        """Expected duration of another trial, by this one's step; else this one's duration."""
        step = self.step_seconds
        if not step:
            return self.seconds
        longer = step * batch * accumulate / (self.batch * self.accumulate)
        return self._overhead_seconds(step) + _steps(longer) * longer

    def batch_within(self, seconds: float) -> float:
        """The largest batch whose trial is expected to take no longer."""
        step = self.step_seconds
        if not step:
            return math.inf if self.seconds <= seconds else 0.0
        longest = (seconds - self._overhead_seconds(step)) / (1 + UNTIMED_STEPS)
        return max(0.0, self.batch * self.accumulate * longest / step)

    def _overhead_seconds(self, step: float) -> float:
        """The part of the duration that does not grow with the batch."""
        return max(0.0, self.seconds - _steps(step) * step)

    @property
    def verdict(self) -> Verdict:
        """Under a quarter of the memory limit "grow", up to a half "fine", then "near"."""
        if self.slow:
            return "slow"
        if not self.fits:
            return "over"
        if self.used_bytes is None or not self.limit_bytes:
            return "fine"
        if self.memory_share < 0.25:
            return "grow"
        return "fine" if self.memory_share <= 0.5 else "near"

    @property
    def memory_share(self) -> float:
        """Memory usage as a part of the limit; 0 where one of them is unknown."""
        return (self.used_bytes or 0) / self.limit_bytes if self.limit_bytes else 0.0

    def leaves_margin(self, margin: float) -> bool:
        """Whether this part of the limit stays free; unknown memory usage counts as so."""
        if self.used_bytes is None or not self.limit_bytes:
            return True
        if self.used_range and self.used_range[1] > self.limit_bytes:
            return False
        return self.used_bytes <= self.limit_bytes * (1 - margin)

    @property
    def memory_usage(self) -> str:
        """`12.40 of 15.75 GiB`."""
        if self.used_bytes is None:
            return "unknown"
        if not self.limit_bytes:
            return format_bytes(self.used_bytes)
        return f"{self.used_bytes / GIB:.2f} of {self.limit_bytes / GIB:.2f} GiB"

    def describe(self) -> str:
        """The result in one line."""
        parts = ["too slow" if self.slow else "fits" if self.fits else "does not fit"]
        if self.used_bytes:
            parts.append(self.memory_usage)
        if self.samples_per_second:
            parts.append(f"{three_digits(self.samples_per_second)} samples/s")
        if self.predicted:
            parts.append(f"predicted {self.predicted.describe()}")
        if not self.fits and self.error and not self.used_bytes:
            parts.append(self.error)
        parts.append("cached" if self.cached else f"{self.seconds:.0f} s")
        return ", ".join(parts)


def _steps(step_seconds: float) -> float:
    """Duration of a trial in steps."""
    return min(TIMED_STEPS, math.ceil(LONG_ENOUGH_SECONDS / step_seconds)) + UNTIMED_STEPS


def memory_by_kind(used: int, program: int, resident: Mapping[str, int]) -> dict[str, int]:
    """`used` bytes by kind: parameters, optimizer, ema and program code; the rest temporaries."""
    kinds = {name: resident.get(name, 0) for name in ("parameters", "optimizer", "ema")}
    temporaries = max(0, used - program - sum(kinds.values()))
    return {**kinds, "temporaries": temporaries, "program": program}


def compiler_failure(batch: int, said: str) -> JobError:
    """The error of a program that the TPU compiler fails on for another reason than its size."""
    return JobError(
        f"batch {batch}: the TPU compiler fails, not for lack of memory: {said}",
        "Another batch (--start, --max) or length of rows, attention without its kernels"
        " (--kernels off) or a newer libtpu may compile; else halve the model to find why.",
        id="task-failed",
    )


def summary_line(text: str, width: int = 300) -> str:
    """The first line that is not blank, cut to a width."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "no message")
    return line if len(line) <= width else line[: width - 3] + "..."
