"""Whether a call meets the conditions of its row: keywords, positions, values."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from tpukit.knowledge.calls import OldCall
from tpukit.probe.lint.names import source_text


def applies(row: OldCall, node: ast.Call, constants: Mapping[str, set[str]]) -> bool:
    """Whether a call row's conditions hold for a call. constants: values assigned to names."""
    given = {keyword.arg: keyword.value for keyword in node.keywords}
    if row.lacks:
        return None not in given and not set(row.lacks) & set(given)
    if row.positional:
        return len(node.args) + len(node.keywords) >= row.positional
    if not row.keywords:
        return True
    values = [(name, given[name]) for name in row.keywords if name in given]
    if row.position is not None:
        before = node.args[: row.position + 1]
        if len(before) > row.position and not any(isinstance(a, ast.Starred) for a in before):
            values.append((row.keywords[0], before[-1]))
    if row.texts:
        values = [(n, v) for n, v in values if n in given or _may_be_text(v, constants)]
    return any(not _values(v, constants) <= set(row.unless.get(name, ())) for name, v in values)


def _may_be_text(node: ast.expr, constants: Mapping[str, set[str]]) -> bool:
    values = _values(node, constants)
    return any(value[:1] in "'\"" or "kind" in value.lower() for value in values)


def _values(node: ast.expr, constants: Mapping[str, set[str]]) -> set[str]:
    """The values that an expression may have, as code."""
    if isinstance(node, ast.IfExp):
        return _values(node.body, constants) | _values(node.orelse, constants)
    if isinstance(node, ast.Name) and constants.get(node.id):
        return constants[node.id]
    return {source_text(node)}


def constants_of(tree: ast.Module) -> dict[str, set[str]]:
    """Name -> the values assigned to it anywhere in a module, as code."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            is_simple = isinstance(node.value, ast.Constant | ast.IfExp)
            texts = _values(node.value, {}) if is_simple else {"?"}
            found.setdefault(node.targets[0].id, set()).update(texts)
    return found
