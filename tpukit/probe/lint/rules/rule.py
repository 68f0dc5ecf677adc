"""One rule is one class: what it finds, what happens there, and what to do instead."""

import ast
import re
from collections.abc import Iterator
from typing import ClassVar

from tpukit.probe.lint.rules.code import Code

Found = tuple[ast.expr | ast.stmt, str]
"""Place, and what stands there."""
BLOCKS = (
    ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.For, ast.AsyncFor,
    ast.While, ast.If, ast.With, ast.AsyncWith, ast.Try, ast.ExceptHandler,
)  # fmt: skip
"""Nodes that hold lists of statements."""


class Rule:
    """A rule for one module. A class's docstring is its section of docs/doctor_rules.md.

    A rule reports only what the module itself shows; where the other half may stand elsewhere (a
    class of another module, a library's loop), it reports nothing.
    """

    id: ClassVar[str]
    effect: ClassVar[str]
    """What happens; "raises" makes the exit code 1."""
    new: ClassVar[str]
    """What to do instead."""
    wrong: ClassVar[str]
    right: ClassVar[str]
    nodes: ClassVar[tuple[type[ast.AST], ...]] = (ast.Module,)
    """Types of the nodes that are visited."""
    words: ClassVar[tuple[str, ...]] = ()
    """Texts that stand in a module with a finding: of each, one of its words."""
    sign: ClassVar[re.Pattern[str] | None] = None
    """What must be found besides for a file of a folder to be parsed for this rule alone."""

    def __init__(self, code: Code) -> None:
        self.code = code

    @classmethod
    def may_stand_in(cls, text: str) -> bool:
        return all(any(word in text for word in each.split()) for each in cls.words)

    @classmethod
    def is_worth_parsing(cls, text: str) -> bool:
        """Whether a file of a folder may hold a finding, by its text."""
        return cls.may_stand_in(text) and (cls.sign is None or cls.sign.search(text) is not None)

    @classmethod
    def concerns(cls, code: Code) -> bool:
        return cls.may_stand_in(code.text) and "torch" in code.packages

    def visit(self, node: ast.AST) -> Iterator[Found]:
        raise NotImplementedError

    def end(self) -> Iterator[Found]:
        """What only the whole module shows."""
        yield from ()


def blocks_of(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """The lists of statements of a node that have an order."""
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if isinstance(block, list) and len(block) > 1:
            yield block
