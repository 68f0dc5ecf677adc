"""A rewritten call: its arguments, or the expression that torch_tpu has in its place."""

import re
from collections.abc import Sequence

import libcst as cst

from tpukit.knowledge.calls import Fix

expression = cst.parse_expression
MOVES = ("builtin", "code", "launch", "method", "sent", "to-device")
"""Values of `Fix.special` that are made here."""


def new_arguments(fix: Fix, call: cst.Call) -> list[cst.Arg]:
    """The arguments of the new call, which takes them all (`fixability.left_alone`)."""
    kept: list[cst.Arg] = []
    by_name = fix.as_keywords
    for index, argument in enumerate(call.args):
        name = "" if argument.star else parameter(fix, argument, index)
        if name in fix.drop:
            by_name = by_name or argument.keyword is None
        elif argument.keyword is None and by_name and not argument.star:
            kept.append(keyword_argument(fix.rename.get(name, name), code_of(argument.value)))
        elif argument.keyword is not None and name in fix.rename:
            kept.append(argument.with_changes(keyword=cst.Name(fix.rename[name])))
        else:
            kept.append(argument)
    given = {a.keyword.value for a in kept if a.keyword}
    added = [keyword_argument(key, value) for key, value in fix.append.items() if key not in given]
    return [*(cst.Arg(expression(text)) for text in fix.prepend), *kept, *added]


def parameter(fix: Fix, argument: cst.Arg, index: int) -> str:
    if argument.keyword is not None:
        return argument.keyword.value
    return fix.parameters[index] if index < len(fix.parameters) else ""


def with_arguments(
    call: cst.Call, function: cst.BaseExpression, arguments: Sequence[cst.Arg]
) -> cst.Call:
    """The call with these arguments; keeps commas and line breaks where possible."""
    default = cst.MaybeSentinel.DEFAULT
    trailing = call.args[-1].comma if call.args else default
    comma = cst.Comma(whitespace_after=separator(call))
    placed = [a.with_changes(comma=comma) if a.comma is default else a for a in arguments]
    placed[-1:] = [last.with_changes(comma=trailing) for last in placed[-1:]]
    if call.args and not placed:
        call = call.with_changes(whitespace_before_args=cst.SimpleWhitespace(""))
    return call.with_changes(func=function, args=placed)


def separator(call: cst.Call) -> cst.BaseParenthesizableWhitespace:
    """The white space after the call's commas."""
    for argument in call.args[:-1]:
        if isinstance(argument.comma, cst.Comma):
            return argument.comma.whitespace_after
    return cst.SimpleWhitespace(" ")


def mixed_precision(call: cst.Call) -> cst.Call:
    """`fp16=True` becomes `mixed_precision="fp16"`; `fp16=False` is removed."""
    kept: list[cst.Arg] = []
    for argument in call.args:
        if argument.keyword is None or argument.keyword.value not in ("fp16", "use_fp16"):
            kept.append(argument)
            continue
        value = code_of(argument.value)
        if value not in ("False", "None"):
            new = '"fp16"' if value == "True" else f'"fp16" if {value} else "no"'
            replacement = keyword_argument("mixed_precision", new)
            kept.append(replacement.with_changes(comma=argument.comma))
    return with_arguments(call, call.func, kept)


def keyword_argument(name: str, value: str) -> cst.Arg:
    return cst.Arg(
        expression(value),
        keyword=cst.Name(name),
        equal=cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace("")),
    )


def code_of(node: cst.CSTNode) -> str:
    return cst.Module([]).code_for_node(node)


# -- calls without a counterpart of one name -----------------------------------------------------
def moved_call(fix: Fix, call: cst.Call) -> cst.BaseExpression | None:
    """The expression that takes a call's place; None where an argument is missing."""
    if fix.special == "code":
        return expression(fix.to)
    if fix.special == "builtin":
        return call.with_changes(func=cst.Name(fix.to))
    if fix.special == "sent":
        return expression(f"{code_of(call)}.to({fix.to})")
    if fix.special == "to-device" and isinstance(call.func, cst.Attribute):
        function = call.func.with_changes(attr=cst.Name("to"))
        return call.with_changes(func=function, args=[cst.Arg(expression(fix.to))])
    given = {parameter(fix, a, index): a.value for index, a in enumerate(call.args)}
    if fix.special == "method":
        holder = given.get(fix.parameters[0])
        return expression(f"{_as_operand(holder)}.{fix.to}()") if holder is not None else None
    return _launched(fix, given)


def moved_text(literal: str, to: str) -> str:
    """A device's name in the quotes that it had; torchrun's variables say where ranks meet."""
    if "://" in literal:
        return literal.replace("xla://", "env://")
    if literal.isdigit() or to == "adamw_torch":
        return f'"{to}"'
    forms = r"xla|gpu|(?:cuda|mps)(?::\d+)?|flash_attention_\d|(?:ddp|deepspeed)\w*|16"
    return re.sub(forms, to, literal)


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
