"""What a compiled program needs by the TPU compiler, and the cache of that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tpukit.io.cache import JsonCache
from tpukit.probe.compiler import hlo

FORMAT = 3
"""Version of the stored fields."""


@dataclass(frozen=True)
class ProgramCosts:
    """What one program needs on one device, as JSON can hold it. Sizes in bytes."""

    total: int = 0
    """All memory needed at once: arguments, outputs (aliased ones once), temporaries, code."""
    temporaries: int = 0
    code: int = 0
    flops: float = 0.0
    """Operations of one run on one device, those of fused attention added by formula."""
    kernel_flops: float = 0.0
    """The part of `flops` in fused attention."""
    bytes_accessed: float = 0.0
    collectives: Mapping[str, int] = field(default_factory=dict)
    collective_bytes: int = 0
    largest: Sequence[Mapping[str, Any]] = ()
    """The largest allocations; see `hlo.Allocation`."""
    refusal: str | None = None
    """The compiler's message where the program does not fit."""


def scheduled_hlo(executable: Any) -> str:
    """The text of a compiled program."""
    return "\n".join(module.to_string() for module in executable.hlo_modules())


def costs_of(executable: Any, kernel_share: float = 1.0) -> ProgramCosts:
    """Memory, operations and collectives of a compiled program.

    kernel_share: see `Program`.
    """
    memory = executable.get_compiled_memory_stats()
    costs = executable.cost_analysis()
    costs = costs[0] if isinstance(costs, Sequence) else costs
    text = scheduled_hlo(executable)
    kernels = hlo.kernel_flops(text) * kernel_share
    return ProgramCosts(
        total=memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.generated_code_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        code=memory.generated_code_size_in_bytes,
        flops=float(costs.get("flops", 0.0)) + kernels,
        kernel_flops=kernels,
        bytes_accessed=float(costs.get("bytes accessed", 0.0)),
        collectives=hlo.collectives(text),
        collective_bytes=hlo.collective_bytes(text),
        largest=[asdict(allocation) for allocation in hlo.largest_buffers(text)],
    )


class CostCache(JsonCache):
    """Costs by program, target, versions and effort."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "compiled", FORMAT)
