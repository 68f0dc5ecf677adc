"""What `tpukit test` asks of a task's evaluation module, and the table of those modules.

Each module has `evaluate(request, backend, tell) -> dict`: the JSON fields of `test`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from tpukit.hardware.backend import Backend
from tpukit.train.requests import EvaluationRequest

EVALUATIONS = {
    "eit": "tpukit.tasks.eit.evaluation.evaluate",
    "summarize": "tpukit.tasks.summarize.evaluation.evaluate",
}


class Evaluate(Protocol):
    """A task's evaluation. Raises `DataError` or `CheckpointError` naming what is wrong."""

    def __call__(
        self, request: EvaluationRequest, backend: Backend, tell: Callable[[str], None]
    ) -> dict[str, Any]: ...
