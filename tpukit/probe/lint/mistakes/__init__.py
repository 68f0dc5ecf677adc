"""Finds mistakes of PyTorch training code, nearly all of which raise nothing: each has a section in
docs/doctor_rules.md.

A rule reports only what the file itself shows; where the other half may stand elsewhere (a class
of another module, a library's loop), it reports nothing.
"""

import ast
from collections.abc import Iterator

from tpukit.knowledge.calls import rules
from tpukit.probe.lint.finding import ModuleFinding, by_rule
from tpukit.probe.lint.mistakes import loops, parts, ranks
from tpukit.probe.lint.mistakes.training_code import Mistake, TrainingCode
from tpukit.probe.lint.names import Names, imported_roots
from tpukit.probe.lint.source import Module
from tpukit.probe.lint.syntax import FUNCTIONS, LOOPS, nodes_below

_SCOPES = (*FUNCTIONS, ast.Module)
_BLOCKS = ("body", "orelse", "finalbody")


def find_mistakes(module: Module, names: Names) -> list[ModuleFinding]:
    """The mistakes of a parsed module that imports torch."""
    assert module.tree is not None
    if "torch" not in imported_roots(module.tree):
        return []
    found = _mistakes(TrainingCode(module.tree, names, module.text))
    known = rules("mistake")
    places = (by_rule(known[id], module.span(node), old) for node, id, old in found)
    return list(dict.fromkeys(places))


def _mistakes(code: TrainingCode) -> Iterator[Mistake]:
    is_trained, evaluates = ".backward(" in code.text, ".eval()" in code.text
    if is_trained:
        yield from loops.eval_not_left(code) if evaluates else loops.never_in_eval(code)
    yield from ranks.in_module(code)
    nodes = nodes_below(code.tree)
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    for node in nodes:
        if isinstance(node, ast.Call):
            yield from parts.in_call(code, node)
        elif isinstance(node, ast.Assign):
            yield from parts.in_assignment(code, node)
        elif isinstance(node, ast.ClassDef):
            yield from parts.in_class(code, node)
        elif isinstance(node, LOOPS) and is_trained:
            yield from loops.in_loop(code, node, classes)
        elif isinstance(node, _SCOPES) and evaluates:
            yield from loops.with_gradients(code, node)
        blocks = node.__dict__ if is_trained and "body" in node.__dict__ else {}
        for name in _BLOCKS if blocks else ():
            block = blocks.get(name)
            if type(block) is list and len(block) > 1:
                yield from loops.in_statements(code, block)
