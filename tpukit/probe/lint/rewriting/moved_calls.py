"""Calls that torch_tpu has no counterpart of in one name: methods, code, what a launcher does."""

from __future__ import annotations

import libcst as cst

from tpukit.knowledge.calls import Fix
from tpukit.probe.lint.rewriting.call_arguments import code_of, expression, parameter

MOVES = ("builtin", "code", "launch", "method")
"""Values of `Fix.special` that are made here."""


def moved_call(fix: Fix, call: cst.Call) -> cst.BaseExpression | None:
    """The expression that takes a call's place; None where an argument is missing."""
    if fix.special == "code":
        return expression(fix.to)
    if fix.special == "builtin":
        return call.with_changes(func=cst.Name(fix.to))
    given = {parameter(fix, a, index): a.value for index, a in enumerate(call.args)}
    if fix.special == "method":
        holder = given.get(fix.parameters[0])
        return expression(f"{_as_operand(holder)}.{fix.to}()") if holder is not None else None
    return _launched(fix, given)


def moved_text(literal: str, to: str) -> str:
    """A device's name in the quotes that it had; torchrun's variables say where ranks meet."""
    if "://" in literal:
        return literal.replace("xla://", "env://")
    return literal.replace("xla", to)


def _launched(fix: Fix, given: dict[str, cst.BaseExpression]) -> cst.BaseExpression | None:
    """`launch(fn, args=(a, b))` as the call that each process makes."""
    function, arguments = given.get("fn"), given.get("args")
    if function is None:
        return None
    values = [fix.to]
    if isinstance(arguments, cst.Tuple):
        values += [code_of(element.value) for element in arguments.elements]
    elif arguments is not None:
        values.append(f"*{_as_operand(arguments)}")
    return expression(f"{_as_operand(function)}({', '.join(values)})")


def _as_operand(node: cst.BaseExpression) -> str:
    plain = isinstance(node, cst.Name | cst.Attribute | cst.Call | cst.Subscript)
    return code_of(node) if plain or node.lpar else f"({code_of(node)})"
