"""What a scan reports, in terms of files and cells, and where that is in a module's text."""

import ast
from dataclasses import asdict, dataclass, field
from typing import Any

from tpukit.knowledge.calls import CallStatus, Fix


@dataclass(frozen=True)
class Finding:
    """A removed or deprecated call, or a pattern that is slow or wrong on TPU, and its place."""

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
    effect: str = ""
    """What happens: "raises", "warns", "waits each step", ..."""
    remark: str = ""
    """The effect that --fix removes, or the reason why it does not apply."""

    def as_json(self) -> dict[str, Any]:
        """The fields of `doctor --json`."""
        fields = asdict(self)
        del fields["remark"]
        return fields


@dataclass(frozen=True)
class ModuleFinding:
    """A finding in one module's text."""

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
    effect: str = ""
    remark: str = ""
    node: ast.expr | ast.alias | ast.stmt | None = field(default=None, compare=False, repr=False)
    """A node of the syntax tree; None in a shell line."""
