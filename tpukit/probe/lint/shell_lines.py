"""Finds old commands and environment variables: in shell lines, calls and assignments."""

import ast
import re
from collections.abc import Iterator
from dataclasses import replace

from tpukit.knowledge.calls import CallTable, OldCall
from tpukit.probe.lint.source import MASK, Module

_VARIABLE = re.compile(r"(?:^|[\s;!%])(?:export\s+|env\s+|set_env\s+)?([A-Z][A-Z0-9_]+)\s?=\s?\S")
SHELL_CALLS = frozenset({"system", "run_line_magic", "getoutput", "run_cell_magic"})
WRITERS = ("os.environ.setdefault", "os.putenv", "os.environ.update", "os.environ.__setitem__")
Span = tuple[int, int, int, int]


def find_in_shell_lines(
    module: Module, table: CallTable
) -> Iterator[tuple[OldCall, Span, str, str]]:
    """(row, place, old text, name) in `%env XLA_USE_BF16=1`, `!python -m torch.distributed.launch`
    and cells of `%%bash`."""
    for number, line in enumerate(module.lines if MASK in module.text else (), start=1):
        if MASK not in line:
            continue
        at = line.index(MASK) + len(MASK)
        indent = len(line) - len(line.lstrip())
        for row, old, match in find_in_command(line[at:], table):
            start = indent + match.start() + 1
            span = (number, start, number, start + len(match.group()))
            yield row, span, old, match.group()


def find_in_command(text: str, table: CallTable) -> Iterator[tuple[OldCall, str, re.Match[str]]]:
    """(row, old text, name's place) in one command, or in several lines of them."""
    for found in _VARIABLE.finditer(text):
        row = table.environment.get(found.group(1))
        inner = re.compile(re.escape(found.group(1))).search(text, found.start())
        if row is not None and inner is not None:
            yield row, row.old, inner
    if text.lstrip().startswith("#"):
        return
    for pattern, row in table.shell:
        match = pattern.search(text)
        if match is not None:
            yield row, match.group()[:80], match


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
    text = getattr(key, "value", None)
    return table.environment.get(text) if isinstance(text, str) else None


def only_set(row: OldCall) -> OldCall:
    """The row of a variable that is set but not read, which has no effect."""
    if row.kind == "environment" and row.status == "removed":
        return replace(row, status="habit", effect="no effect")
    return row
