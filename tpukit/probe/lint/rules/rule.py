"""One rule is one class: what it finds, what happens there, and what to do instead."""

import ast
from collections.abc import Iterator
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

    def __init__(self, code: Code) -> None:
        self.code = code

    @classmethod
    def concerns(cls, code: Code) -> bool:
        """Whether a module may hold a finding."""
        if code.to_xla and "torch_xla" in cls.packages:
            return True
        has_words = all(any(word in code.text for word in w.split("|")) for w in cls.words)
        return has_words and not code.packages.isdisjoint(cls.packages)

    def visit(self, node: Any) -> Iterator[Found]:
        """What is wrong at a node of one of the types."""
        raise NotImplementedError


def blocks_of(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """The lists of statements of a node that have an order."""
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if isinstance(block, list) and len(block) > 1:
            yield block
