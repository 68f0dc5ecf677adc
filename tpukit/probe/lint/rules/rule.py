"""One rule is one class: what it finds, what happens there, and what to do instead."""

import ast
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, ClassVar

from tpukit.probe.lint.rules.code import Code

Found = tuple[ast.expr | ast.stmt, str]
"""Place, and what stands there."""
BLOCKS = (
    ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.For, ast.AsyncFor,
    ast.While, ast.If, ast.With, ast.AsyncWith, ast.Try, ast.ExceptHandler,
)  # fmt: skip
"""Nodes that hold lists of statements."""
TORCH, XLA, TPU = ("torch",), ("torch_xla",), ("torch_xla", "accelerate")
"""Values of `Rule.packages`; the last: what reaches a TPU."""


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
    packages: ClassVar[tuple[str, ...]] = TORCH
    """One of them is imported."""
    words: ClassVar[tuple[str, ...]] = ()
    """Texts that stand in a module with a finding; `a|b` is one of them."""
    sign: ClassVar[re.Pattern[str] | None] = None
    """What it shows besides, where the words are frequent."""

    def __init__(self, code: Code) -> None:
        self.code = code

    @classmethod
    def may_stand_in(cls, text: str) -> bool:
        """Whether a file may hold a finding: most are ruled out before they are parsed."""
        if not all(any(word in text for word in each.split("|")) for each in cls.words):
            return False
        is_imported = not imported(text).isdisjoint(cls.packages)
        return is_imported and (cls.sign is None or cls.sign.search(text) is not None)

    @classmethod
    def concerns(cls, code: Code) -> bool:
        if code.to_xla and "torch_xla" in cls.packages:
            return True
        return not code.packages.isdisjoint(cls.packages) and cls.may_stand_in(code.text)

    def visit(self, node: Any) -> Iterator[Found]:
        """What is wrong at a node of one of the types."""
        raise NotImplementedError


@lru_cache(maxsize=1)
def imported(text: str) -> frozenset[str]:
    """The words of the lines that import."""
    return frozenset(re.findall(r"\w+", " ".join(re.findall(r"\b(?:import|from)\s[^\n]*", text))))


def blocks_of(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """The lists of statements of a node that have an order."""
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if isinstance(block, list) and len(block) > 1:
            yield block
