"""What a step takes at least: the slowest of arithmetic, memory and links, each at its peak."""

from __future__ import annotations

from dataclasses import dataclass

from tpukit.probe.compiler.targets import Target


@dataclass(frozen=True)
class StepEstimate:
    """Seconds of one optimizer step if everything overlapped perfectly; an estimate, no promise."""

    arithmetic_seconds: float
    memory_seconds: float
    links_seconds: float | None
    """None where the links' bandwidth is not published."""

    @property
    def seconds(self) -> float:
        """The slowest of them."""
        return max(self.arithmetic_seconds, self.memory_seconds, self.links_seconds or 0.0)

    @property
    def bound_by(self) -> str:
        """Which of them that is."""
        parts = {
            "arithmetic": self.arithmetic_seconds,
            "memory": self.memory_seconds,
            "links": self.links_seconds or 0.0,
        }
        return max(parts, key=lambda name: parts[name])


def estimate_step(
    target: Target, flops: float, bytes_accessed: float, collective_bytes: float
) -> StepEstimate:
    """The roofline (Williams, Waterman and Patterson, 2009) of one device.

    A collective's bytes leave and arrive once each: both directions of the links are counted.
    """
    chip = target.generation
    links = None
    if chip.link_bytes_per_second:
        links = 2 * collective_bytes / chip.link_bytes_per_second
    return StepEstimate(
        flops / chip.flops_per_second, bytes_accessed / chip.bytes_per_second, links
    )
