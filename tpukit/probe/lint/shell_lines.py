"""Finds old commands and variables in shell lines: a notebook's, and those that Python runs."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tpukit.knowledge.calls import CallTable, OldCall
from tpukit.probe.lint.source import MASK, Module

_VARIABLE = re.compile(r"(?:^|[\s;!%])(?:export\s+|env\s+|set_env\s+)?([A-Z][A-Z0-9_]+)\s?=\s?\S")
SHELL_CALLS = frozenset({"system", "run_line_magic", "getoutput", "run_cell_magic"})
Span = tuple[int, int, int, int]


def find_in_shell_lines(
    module: Module, table: CallTable
) -> Iterator[tuple[OldCall, Span, str, str]]:
    """(row, place, old text, name) in `%env XLA_USE_BF16=1`, `!python -m torch.distributed.launch`
    and cells of `%%bash`."""
    for number, line in enumerate(module.lines, start=1):
        if MASK not in line:
            continue
        at = line.index(MASK) + len(MASK)
        indent = len(line) - len(line.lstrip())
        for row, match in _matches(line[at:], table):
            start = indent + match.start()
            span = (number, start, number, start + len(match.group()))
            yield row, span, _shown(row, match), match.group()


def find_in_command(text: str, table: CallTable) -> Iterator[tuple[OldCall, str, str]]:
    """(row, old text, name) in one command, or in several lines of them."""
    for row, match in _matches(text, table):
        yield row, _shown(row, match), match.group()


def _matches(text: str, table: CallTable) -> Iterator[tuple[OldCall, re.Match[str]]]:
    for found in _VARIABLE.finditer(text):
        row = table.environment.get(found.group(1))
        inner = re.compile(re.escape(found.group(1))).search(text, found.start())
        if row is not None and inner is not None:
            yield row, inner
    if text.lstrip().startswith("#"):
        return
    for pattern, row in table.shell:
        match = pattern.search(text)
        if match is not None:
            yield row, match


def _shown(row: OldCall, match: re.Match[str]) -> str:
    return row.old if row.kind == "environment" else match.group()[:80]
