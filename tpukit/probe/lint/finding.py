"""One place in a user's code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tpukit.knowledge.calls import CallStatus, Fix


@dataclass(frozen=True, order=True)
class Finding:
    """A deprecated or removed call, or a habit that hurts, where it stands."""

    path: str
    cell: int | None
    """The notebook's cell, counted from 1 over all its cells; None in a Python file."""
    line: int
    """In the file or the cell, from 1."""
    column: int
    """In characters, from 1."""
    id: str
    old: str
    new: str
    since: str
    status: CallStatus
    fixable: bool = False

    def as_json(self) -> dict[str, Any]:
        """The fields that `doctor --json` promises, and the row's id."""
        return {
            "path": self.path,
            "cell": self.cell,
            "line": self.line,
            "column": self.column,
            "old": self.old,
            "new": self.new,
            "since": self.since,
            "status": self.status,
            "id": self.id,
            "fixable": self.fixable,
        }


@dataclass(frozen=True)
class Place:
    """A finding in one module's text, before it is told in terms of files and cells."""

    line: int
    column: int
    """In characters, from 0."""
    end_line: int
    end_column: int
    id: str
    old: str
    new: str
    since: str
    status: CallStatus
    fix: Fix | None = None
    name: str = ""
    """The qualified name that was used."""
