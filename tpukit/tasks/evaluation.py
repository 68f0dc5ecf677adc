"""What `tpukit test` asks of a task's evaluation module, and the table of those modules.

Each module has `evaluate(request, backend, tell) -> dict`: the JSON fields of `test`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tpukit.hardware.backend import Backend
from tpukit.train.run_folder import TrainedRun

EVALUATIONS = {
    "eit": "tpukit.tasks.eit.evaluation",
    "summarize": "tpukit.tasks.summarize.evaluation",
}


@dataclass(frozen=True)
class EvaluationRequest:
    """The options of `tpukit test`; None was not given."""

    run: TrainedRun | None = None
    """The run whose best weights are tested."""
    checkpoint: Path | None = None
    """A file in the published code's form, instead of a run."""
    data: str | None = None
    """`simulated`, `uef2017`, `ktc2023`, a folder; a task may know other names."""
    data_path: Path | None = None
    out: Path | None = None
    """Folder for predictions and pictures."""
    sampling_steps: int | None = None
    samples: int = 1
    """Images drawn for each measurement; their mean is tested too."""
    limit: int | None = None
    """Only the first so many samples."""
    rows: int | None = None
    """Samples at once, over all devices."""
    seed: int = 0


class Evaluate(Protocol):
    """A task's evaluation. Raises `DataError` or `CheckpointError` naming what is wrong."""

    def __call__(
        self, request: EvaluationRequest, backend: Backend, tell: Callable[[str], None]
    ) -> dict[str, Any]: ...
