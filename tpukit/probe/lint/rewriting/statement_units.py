"""Cuts a module into the smallest statements to rewrite, so that a long file takes no longer.

A unit is a simple statement, or the head of a compound one, as a module of its own: what is
indented stands below `if 1:`, a head is followed by `pass`. Columns stay as they are.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_BODIES = ("body", "orelse", "finalbody")


@dataclass(frozen=True)
class Unit:
    """Lines of a module, from 1, and what makes them a module of their own."""

    first: int
    last: int
    prefix: str = ""
    suffix: str = ""
    alone: bool = False
    """Nothing else stands in the block around it."""

    @property
    def offset(self) -> int:
        """What to add to a line of the unit's text for the module's line."""
        return self.first - 1 - self.prefix.count("\n")

    def text(self, lines: Sequence[str]) -> str:
        inner = "\n".join(lines[self.first - 1 : self.last])
        return f"{self.prefix}{inner}\n{self.suffix}"

    def lines_of(self, text: str) -> list[str]:
        """The lines of a rewritten text, without what was added around them."""
        inner = text[len(self.prefix) : len(text) - len(self.suffix)]
        if not inner.strip() or (self.prefix and inner.strip() == "pass" and not self.alone):
            # An emptied block got a `pass`, though others may stand in it.
            return []
        return inner.split("\n")[:-1]


def units_at(tree: ast.Module, lines: Sequence[str], line: int, newline: str) -> list[Unit]:
    """The units that hold a line: the smallest first, the whole module last."""
    found = [Unit(1, len(lines))]
    body: Sequence[ast.stmt] | None = tree.body
    while body:
        inside = [s for s in body if first_line(s) <= line <= (s.end_lineno or s.lineno)]
        if not inside:
            break
        first, last = first_line(inside[0]), max(s.end_lineno or s.lineno for s in inside)
        alone = len(inside) == len(body)
        found.append(_unit(first, last, lines, newline, alone))
        statement = inside[-1]
        own = getattr(statement, "body", None)
        if not isinstance(own, list):
            break
        head_end = first_line(own[0]) - 1
        if first <= line <= head_end:
            found.append(_unit(first, head_end, lines, newline, alone, head=True))
            break
        body = next((b for b in _bodies(statement) if _holds(b, line)), None)
    return found[::-1]


def first_line(statement: ast.stmt) -> int:
    """Where a statement starts, its decorators included."""
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(d.lineno for d in decorators)])


def _unit(
    first: int, last: int, lines: Sequence[str], newline: str, alone: bool, *, head: bool = False
) -> Unit:
    start = lines[first - 1]
    indent = start[: len(start) - len(start.lstrip())]
    prefix = f"if 1:{newline}" if indent else ""
    if start.lstrip().startswith("elif"):
        prefix += f"{indent}if 0: pass{newline}"
    suffix = f"{indent} pass{newline}" if head else ""
    return Unit(first, last, prefix, suffix, alone)


def _bodies(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    for name in _BODIES:
        yield getattr(statement, name, [])
    for part in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
        yield part.body


def _holds(body: Sequence[ast.stmt], line: int) -> bool:
    return bool(body) and first_line(body[0]) <= line <= (body[-1].end_lineno or body[-1].lineno)
