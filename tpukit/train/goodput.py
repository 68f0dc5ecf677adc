"""Goodput: the share of a run's time that made steps which it kept."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Goodput:
    """Seconds of a run over all its sessions: pauses between them are left out, and of a session
    that was killed what came after its last log line."""

    kept_before: float = 0.0
    """Seconds of earlier sessions that made steps before the present one."""
    elapsed_before: float = 0.0
    """Seconds of earlier sessions."""
    began: float = field(default_factory=time.monotonic)
    kept_now: float = 0.0

    @classmethod
    def after(cls, rows: Iterable[Mapping[str, Any]], step: int, began: float) -> "Goodput":
        """That of a run which goes on after `step`, by its log lines; those behind are lost."""
        rows = list(rows)
        return cls(
            sum(float(row.get("step_seconds", 0.0)) for row in rows if row["step"] <= step),
            max((float(row.get("elapsed_seconds", 0.0)) for row in rows), default=0.0),
            began,
        )

    def fields(self, step_seconds: float) -> dict[str, float]:
        """Of a log line, whose steps took `step_seconds`."""
        self.kept_now += step_seconds
        return {
            "step_seconds": step_seconds,
            "elapsed_seconds": self.elapsed_seconds,
            "goodput": self.share,
        }

    @property
    def elapsed_seconds(self) -> float:
        """Seconds of all sessions until now."""
        return self.elapsed_before + time.monotonic() - self.began

    @property
    def share(self) -> float:
        """Part of them that made steps which are kept."""
        return min(1.0, (self.kept_before + self.kept_now) / max(self.elapsed_seconds, 1e-9))
