"""Source files of the place where an exception was raised, read as syntax trees."""

import ast
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TypeVar

Node = TypeVar("Node", bound=ast.AST)
Raising = ast.Raise | ast.Assert
Function = ast.FunctionDef | ast.AsyncFunctionDef
_MOST_BYTES = 4 << 20
_SPACE = re.compile(r"\s+")
_LONGEST = 150


@cache
def tree(path: str) -> ast.Module | None:
    """The file's syntax tree; None where it cannot be read or is not Python."""
    try:
        file = Path(path)
        if not path.endswith(".py") or file.stat().st_size > _MOST_BYTES:
            return None
        return ast.parse(file.read_text(encoding="utf-8", errors="replace"))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None


@cache
def parents(path: str) -> dict[ast.AST, ast.AST]:
    """Each node of a file, and the one around it."""
    module = tree(path)
    nodes = ast.walk(module) if module else ()
    return {child: node for node in nodes for child in ast.iter_child_nodes(node)}


def smallest(path: str, line: int, kinds: type[Node]) -> Node | None:
    """The smallest node of these kinds around a line."""
    around = [node for node in parents(path) if isinstance(node, kinds) and covers(node, line)]
    return min(around, key=_height, default=None)


def smallest_raise(path: str, line: int) -> Raising | None:
    """The statement on a line that raises by itself."""
    return smallest(path, line, Raising)  # type: ignore[arg-type]


def covers(node: ast.AST, line: int) -> bool:
    first, last = getattr(node, "lineno", 0), getattr(node, "end_lineno", None)
    return bool(last and first <= line <= last)


def _height(node: ast.AST) -> int:
    return int(getattr(node, "end_lineno", 0) - getattr(node, "lineno", 0))


def function_at(path: str, line: int) -> Function | None:
    return smallest(path, line, Function)  # type: ignore[arg-type]


def parameters_of(function: Function) -> list[ast.arg]:
    """The parameters without `self` and the variadic ones."""
    given = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return given[1:] if given and given[0].arg in ("self", "cls") else given


def called(call: ast.Call) -> str:
    """The last part of the name that is called."""
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def call_on(path: str, line: int, callee: str) -> ast.Call | None:
    """The call on a line that entered `callee`, a function or a class; where none has that name
    (a subclass, an instance), the only one."""
    calls = [n for n in parents(path) if isinstance(n, ast.Call) and covers(n, line)]
    named = [call for call in calls if called(call) == callee]
    if named:
        return min(named, key=_height)
    return calls[0] if len(calls) == 1 else None


def callee_of(path: str, function: Function) -> str:
    """What a call of this function names: of a constructor the class."""
    owner = parents(path).get(function)
    is_made = function.name in ("__init__", "__new__") and isinstance(owner, ast.ClassDef)
    return owner.name if is_made and isinstance(owner, ast.ClassDef) else function.name


def given_argument(call: ast.Call, function: Function, name: str) -> ast.expr | None:
    """What a call gives to a parameter; None where it is the default or not clear."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    names = [parameter.arg for parameter in parameters_of(function)]
    is_plain = not any(isinstance(value, ast.Starred) for value in call.args)
    if is_plain and name in names and names.index(name) < len(call.args):
        return call.args[names.index(name)]
    return None


def short(node: ast.AST, width: int = _LONGEST) -> str:
    """The code of a node in one line, cut."""
    text = _SPACE.sub(" ", ast.unparse(node))
    return text if len(text) <= width else f"{text[:width]} ..."


# -- messages --------------------------------------------------------------------------------------
def values_in(made: ast.expr | None, message: str) -> dict[str, str] | None:
    """The values of a message by the expressions that it was made of.

    None where the message is another one, or is computed elsewhere.
    """
    parts = _template(made) if made is not None else None
    if parts is None or not any(isinstance(part, str) and part.strip() for part in parts):
        return None
    names = [ast.unparse(part) for part in parts if not isinstance(part, str)]
    form = "".join(_literal(part) if isinstance(part, str) else "(.*?)" for part in parts)
    said = _SPACE.sub(" ", message).strip()
    match = re.fullmatch(form.strip(), said) or re.match(_beginning(parts), said)
    if match is None:
        return None
    return {name: value for name, value in zip(names, match.groups(), strict=False) if value}


def _beginning(parts: Sequence[str | ast.expr]) -> str:
    """The form of the first line of a message of several lines."""
    form = ""
    for part in parts:
        head, newline, _ = part.partition("\n") if isinstance(part, str) else ("", "", "")
        form += _literal(head if newline else part) if isinstance(part, str) else "(.*?)"
        if newline:
            return form.rstrip() + "$" if len(form) > 12 else "(?!)"
    return "(?!)"


def _literal(text: str) -> str:
    return re.escape(_SPACE.sub(" ", text)).replace(r"\ ", r"\s?")


def _template(node: ast.expr) -> list[str | ast.expr] | None:
    """Texts and expressions of a message; None where it is made in another way."""
    if isinstance(node, ast.Constant):
        return [str(node.value)]
    if isinstance(node, ast.JoinedStr):
        return [
            str(part.value) if isinstance(part, ast.Constant) else part.value
            for part in node.values
            if isinstance(part, ast.Constant | ast.FormattedValue)
        ]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _template(node.left), _template(node.right)
        return [*left, *right] if left and right else None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        values = node.right.elts if isinstance(node.right, ast.Tuple) else [node.right]
        return _filled(node.left, r"%[-+ #0-9.]*[sdrifgx]", values)
    if isinstance(node, ast.Call) and called(node) == "format":
        assert isinstance(node.func, ast.Attribute)
        return _filled(node.func.value, r"\{[^{}]*\}", node.args)
    return [node] if isinstance(node, ast.Name | ast.Attribute | ast.Call) else None


def _filled(text: ast.expr, places: str, values: Sequence[ast.expr]) -> list[str | ast.expr] | None:
    parts = _template(text)
    if not parts or len(parts) != 1 or not isinstance(parts[0], str):
        return None
    fixed = re.split(places, parts[0])
    filled: list[str | ast.expr] = [fixed[0]]
    for index, rest in enumerate(fixed[1:]):
        filled += [values[index] if index < len(values) else ast.Name("_"), rest]
    return filled
