"""What a scan reports, and where."""

import ast
from dataclasses import dataclass, field
from typing import Any

from tpukit.knowledge.calls import CallStatus, Fix


@dataclass(frozen=True)
class Finding:
    """A removed or deprecated call, or a pattern that is slow or wrong on TPU, and its place: in a
    module's text at first, then in a file or a cell."""

    line: int
    column: int
    """In characters, from 1 (as lines)."""
    end_line: int
    end_column: int
    id: str
    old: str
    new: str
    since: str
    status: CallStatus
    effect: str = ""
    """What happens: "raises", "warns", "waits each step", ..."""
    remark: str = ""
    """The effect that --fix removes, or the reason why it does not apply."""
    fix: Fix | None = None
    name: str = ""
    """The qualified name that was used."""
    node: ast.expr | ast.alias | ast.stmt | None = field(default=None, compare=False, repr=False)
    """A node of the module's syntax tree; None in a shell line, and in what a scan reports."""
    path: str = ""
    cell: int | None = None
    """The notebook's cell, counted from 1 over all its cells; None in a Python file."""

    @property
    def fixable(self) -> bool:
        return self.fix is not None

    def as_json(self) -> dict[str, Any]:
        """The fields of `doctor --json`."""
        return {
            "path": self.path, "cell": self.cell, "line": self.line, "column": self.column,
            "id": self.id, "old": self.old, "new": self.new, "since": self.since,
            "status": self.status, "fixable": self.fixable, "effect": self.effect,
        }  # fmt: skip
