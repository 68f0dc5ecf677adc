"""Finds the environment variables that a call or an assignment sets."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace

from tpukit.knowledge.calls import CallTable, OldCall

WRITERS = ("os.environ.setdefault", "os.putenv", "os.environ.update", "os.environ.__setitem__")


def variables_set(node: ast.Call, table: CallTable) -> Iterator[tuple[ast.expr, OldCall, str]]:
    """(place, row, name) of the variables that a call of one of the writers sets."""
    keys: list[ast.expr | None] = list(node.args[:1])
    if node.args and isinstance(node.args[0], ast.Dict):
        keys = list(node.args[0].keys)
    for key in keys:
        row = variable_row(key, table)
        if row is not None and isinstance(key, ast.Constant):
            yield key, only_set(row), str(key.value)
    for keyword in node.keywords:
        row = table.environment.get(keyword.arg or "")
        if row is not None:
            yield keyword.value, only_set(row), keyword.arg or ""


def variable_row(key: ast.expr | None, table: CallTable) -> OldCall | None:
    if isinstance(key, ast.Constant) and isinstance(key.value, str):
        return table.environment.get(key.value)
    return None


def only_set(row: OldCall) -> OldCall:
    """The row of a variable that is set and not read: nothing raises, nothing happens."""
    if row.kind == "environment" and row.status == "removed":
        return replace(row, status="habit", effect="no effect")
    return row
