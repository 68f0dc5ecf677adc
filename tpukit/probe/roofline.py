"""Lower bound of a step's time: the slowest of arithmetic, memory and links, each at its peak."""

from collections.abc import Mapping
from dataclasses import dataclass

from tpukit.probe.targets import GpuTarget, Target
from tpukit.probe.trial import Trial


@dataclass(frozen=True)
class StepEstimate:
    """Seconds of one optimizer step if everything overlapped perfectly; an estimate, no promise."""

    seconds_by: Mapping[str, float]
    """arithmetic, memory, and links where their bandwidth is published."""

    @property
    def seconds(self) -> float:
        """The slowest of them."""
        return max(self.seconds_by.values())

    @property
    def bound_by(self) -> str:
        """Which of them that is."""
        return max(self.seconds_by, key=self.seconds_by.__getitem__)


def samples_per_second(target: Target | GpuTarget | None, trial: Trial) -> float | None:
    """Over all devices: measured, else by the estimate; None where neither is known."""
    step = estimate_step(target, trial)
    if trial.samples_per_second or step is None:
        return trial.samples_per_second
    return trial.batch * trial.accumulate * (trial.devices or 1) / step.seconds


def estimate_step(target: Target | GpuTarget | None, trial: Trial) -> StepEstimate | None:
    """The roofline (Williams, Waterman and Patterson, 2009) of a compiled trial's step.

    A collective's bytes leave and arrive once each: both directions of the links are counted.
    """
    if target is None or trial.flops is None or trial.bytes_accessed is None:
        return None
    chip = target.generation
    if not chip.flops_per_second or not chip.bytes_per_second:
        return None
    seconds = {
        "arithmetic": trial.flops / chip.flops_per_second,
        "memory": trial.bytes_accessed / chip.bytes_per_second,
    }
    if chip.link_bytes_per_second:
        seconds["links"] = 2 * trial.collective_bytes / chip.link_bytes_per_second
    return StepEstimate(seconds)
