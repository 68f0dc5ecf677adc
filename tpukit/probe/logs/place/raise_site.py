"""The `raise` that an exception came from: its condition, the values in it, what makes it false."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tpukit.probe.logs.explanations import shorten
from tpukit.probe.logs.place import source
from tpukit.probe.logs.tracebacks import WRAPPING_CALLS, Frame, Raised

_MOST_HELPERS = 4
"""Frames between the line that decides and the one that raises: `torch._assert`, `reraise`."""
_MOST_STEPS = 12
_MOST_TESTS = 2
_MOST_SET = 3
_MOST_VALUES = 6
_NEGATED = {
    ast.Eq: "!=", ast.NotEq: "==", ast.Lt: ">=", ast.LtE: ">", ast.Gt: "<=", ast.GtE: "<",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
_AS_WRITTEN = {
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
    ast.Is: "is", ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in",
}  # fmt: skip
_LISTED = re.compile(r"[\[({'\"]|(?:list|tuple|set|dict)\(")


@dataclass(frozen=True)
class Test:
    """A condition on the way to the `raise`."""

    node: ast.expr
    holds: bool

    @property
    def text(self) -> str:
        return source.short(self.node) if self.holds else f"not ({source.short(self.node)})"


@dataclass(frozen=True)
class Site:
    """Where an exception was raised, and why."""

    frame: Frame
    tests: Sequence[Test]
    values: Mapping[str, str]
    set_by: Sequence[str] = ()
    """Code and place of what gives the values, in the user's files."""
    ways_out: Sequence[str] = field(default=())

    @property
    def why(self) -> str:
        """The condition with its values, as a sentence."""
        tests = " and ".join(f"`{test.text}`" for test in self.tests)
        known = [f"`{name}` is {value}" for name, value in self.values.items()][:_MOST_VALUES]
        said = f"{_place(self.frame)} raises it where {tests}"
        set_by = f" Yours: {', '.join(self.set_by)}." if self.set_by else ""
        return said + (f": {', '.join(known)}" if known else "") + f".{set_by}"

    @property
    def fix(self) -> str:
        """What makes the condition false; empty where its form does not say."""
        text = f"{' or '.join(self.ways_out)}." if self.ways_out else ""
        return text[:1].upper() + text[1:]


def raise_site(raised: Raised) -> Site | None:
    """The site of an exception whose source files are here; None where it is not found.

    The class and the whole message must be those of the `raise`: another release's line may stand
    there now.
    """
    frames = raised.frames
    for index in range(len(frames) - 1, max(len(frames) - 1 - _MOST_HELPERS, -1), -1):
        frame = frames[index]
        node = source.smallest_raise(frame.path, frame.line)
        if node is None:
            if frame.where in WRAPPING_CALLS:
                continue
            return None
        found = _decided_by_caller(frames, index, node) or (index, node)
        if isinstance(found[1], ast.Raise) and isinstance(found[1].exc, ast.Name):
            continue  # made elsewhere
        return _site(raised, *found)
    return None


def _decided_by_caller(
    frames: Sequence[Frame], index: int, node: ast.Raise | ast.Assert
) -> tuple[int, ast.Assert] | None:
    """The condition that a caller gives to a helper, as `torch._check(a == b, ...)` does."""
    frame = frames[index]
    function = source.function_at(frame.path, frame.line)
    tests = [Test(node.test, False)] if isinstance(node, ast.Assert) else _tests(frame, node)
    if not tests or not index or function is None:
        return None
    test = tests[0].node.operand if isinstance(tests[0].node, ast.UnaryOp) else tests[0].node
    names = [parameter.arg for parameter in source.parameters_of(function)]
    call = source.call_on(
        frames[index - 1].path, frames[index - 1].line, source.callee_of(frame.path, function)
    )
    if not isinstance(test, ast.Name) or test.id not in names or call is None:
        return None
    given = source.given_argument(call, function, test.id)
    if given is None:
        return None
    return index - 1, ast.copy_location(ast.Assert(given, None), call)


def _site(raised: Raised, index: int, node: ast.Raise | ast.Assert) -> Site | None:
    frame = raised.frames[index]
    made: ast.expr | None = node.msg if isinstance(node, ast.Assert) else node.exc
    said = f"{raised.message}\n{raised.details}".strip()
    values: dict[str, str] | None = {}
    if isinstance(node, ast.Raise):
        if not isinstance(made, ast.Call) or not _is_class(made, raised.class_name):
            return None
        values = source.values_in(next(iter(made.args), None), said)
        tests = _tests(frame, node)
    else:
        tests = [Test(node.test, False)]
        values = source.values_in(made, said) if made is not None else {}
        values = {} if values is None and index < len(raised.frames) - 1 else values
    if values is None or not tests:
        return None
    caught = _caught(frame, node)
    tests = [test for test in tests if not caught & set(_names(test.node))][:_MOST_TESTS]
    tests = [Test(_followed(frame, test.node), test.holds) for test in tests]
    if not tests:
        return None
    names = list(dict.fromkeys(name for test in tests for name in _names(test.node)))
    known = {n: shorten(value, 80) for n in names if (value := _value(n, frame, values))}
    set_by = list(dict.fromkeys(text for name in names for text in _set_by(raised, index, name)))
    outs = _ways_out(tests[0].node, tests[0].holds, {**values, **known})
    return Site(frame, tests, known, set_by[:_MOST_SET], outs)


def _is_class(made: ast.Call, name: str) -> bool:
    """Whether a call makes an exception of this class; of a function that makes one it may be."""
    last = source.called(made)
    return last == name or last[:1].islower()


def _tests(frame: Frame, node: ast.stmt) -> list[Test]:
    """The conditions under which a function reaches a node, the nearest first.

    An earlier `if` whose body leaves the function decides too, where no other one does.
    """
    around, found = source.parents(frame.path), []
    child: ast.AST = node
    while child in around and not isinstance(around[child], source.Function | ast.Lambda):
        outer = around[child]
        if isinstance(outer, ast.If):
            found.append(Test(outer.test, child in outer.body))
        elif isinstance(outer, ast.ExceptHandler):
            break
        child = outer
    return found or _left_before(child, getattr(around.get(child), "body", []))


def _left_before(statement: ast.AST, body: Sequence[ast.stmt]) -> list[Test]:
    """The `if`s above a statement whose bodies leave the function, the nearest first."""
    first = getattr(statement, "lineno", 0)
    above = [s for s in body if isinstance(s, ast.If) and s.lineno < first]
    leaving = [s for s in above if isinstance(s.body[-1], ast.Return | ast.Raise) and not s.orelse]
    return [Test(inner.test, False) for inner in reversed(leaving)]


def _caught(frame: Frame, node: ast.AST) -> set[str]:
    """The names of the exceptions that are handled where this one is raised."""
    around, names = source.parents(frame.path), set()
    child = node
    while child in around:
        child = around[child]
        if isinstance(child, ast.ExceptHandler) and child.name:
            names.add(child.name)
    return names


def _followed(frame: Frame, test: ast.expr) -> ast.expr:
    """The condition, with names replaced that stand for a condition or for a quotient."""
    function = source.function_at(frame.path, frame.line)
    if function is None:
        return test
    made = {
        ast.unparse(target): node.value
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and node.lineno < frame.line and _decides(node.value)
        for target in node.targets
        if isinstance(target, ast.Name | ast.Attribute)
    }

    class Follow(ast.NodeTransformer):
        def generic_visit(self, node: ast.AST) -> ast.AST:
            is_name = isinstance(node, ast.Name | ast.Attribute)
            return made.get(ast.unparse(node)) or node if is_name else super().generic_visit(node)

    # A copy: the tree of the file stays as it is.
    return Follow().visit(ast.parse(ast.unparse(test), mode="eval").body)  # type: ignore[no-any-return]


def _decides(value: ast.expr) -> bool:
    is_quotient = isinstance(value, ast.BinOp) and isinstance(value.op, ast.FloorDiv)
    return isinstance(value, ast.Compare | ast.BoolOp) or is_quotient


def _names(node: ast.AST) -> list[str]:
    """Names and attributes that a condition reads, without functions and classes."""
    called = {inner.func for inner in ast.walk(node) if isinstance(inner, ast.Call)}
    found = [
        ast.unparse(inner)
        for inner in ast.walk(node)
        if isinstance(inner, ast.Name | ast.Attribute) and inner not in called
    ]
    found = [name for name in dict.fromkeys(found) if not hasattr(builtins, name)]
    return [n for n in found if n != "self" and not any(o.startswith(f"{n}.") for o in found)]


def _value(name: str, frame: Frame, values: Mapping[str, str]) -> str:
    live = frame.names
    return live.get(name) or live.get(f"self.{name}") or values.get(name, "")


# -- where the user's code gives a value -----------------------------------------------------------
def _set_by(raised: Raised, index: int, name: str) -> Iterator[str]:
    """Where the user's code gives a name's value: code and place."""
    traced = _traced(raised.frames, index, name)
    if traced:
        yield traced
        return
    last = name.rpartition(".")[2]
    files = dict.fromkeys(frame.path for frame in raised.frames if frame.is_users)
    found = {text: None for path in files for text in _settings(path, last)}
    yield from list(found)[:_MOST_SET]


def _traced(frames: Sequence[Frame], index: int, name: str) -> str:
    """Follows a parameter outwards through the calls to the user's code."""
    for _ in range(_MOST_STEPS):
        frame, first = frames[index], name.partition(".")[0]
        function = source.function_at(frame.path, frame.line)
        if function is None or not index or frame.is_users:
            return ""
        outer = frames[index - 1]
        call = source.call_on(outer.path, outer.line, source.callee_of(frame.path, function))
        value = source.given_argument(call, function, first) if call else None
        if value is None:
            return ""
        name, index = ast.unparse(value) + name[len(first) :], index - 1
        if outer.is_users:
            return f"`{first}={source.short(value, 60)}` ({outer.place})"
        if not isinstance(value, ast.Name | ast.Attribute):
            return ""
    return ""


def _settings(path: str, name: str) -> Iterator[str]:
    """Places of a file that give a value to a setting of this name."""
    for node in source.parents(path):
        line, text = getattr(node, "lineno", 0), ""
        if isinstance(node, ast.keyword) and node.arg == name:
            line, text = node.value.lineno, f"{name}={source.short(node.value, 60)}"
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == name:
                    line, text = value.lineno, f"{name!r}: {source.short(value, 60)}"
        elif isinstance(node, ast.Assign):
            attributes = [
                t for t in node.targets if isinstance(t, ast.Attribute) and t.attr == name
            ]
            text = source.short(node, 70) if attributes else ""
        if text:
            yield f"`{text}` ({Frame(path, line).place})"


# -- what makes a condition false ------------------------------------------------------------------
def _ways_out(test: ast.expr, holds: bool, values: Mapping[str, str]) -> list[str]:
    """Alternatives, each of which makes the condition false; empty where one cannot be named."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _ways_out(test.operand, not holds, values)
    if isinstance(test, ast.BoolOp):
        parts = [_ways_out(part, holds, values) for part in test.values]
        if isinstance(test.op, ast.And) == holds:
            return [way for part in parts for way in part]
        return [" and ".join(part[0] for part in parts)] if all(parts) else []
    way = _way_out(test, holds, values)
    return [way] if way else []


def _way_out(test: ast.expr, holds: bool, values: Mapping[str, str]) -> str:
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        return _of_comparison(test, holds, values)
    name = ast.unparse(test)
    if isinstance(test, ast.Name | ast.Attribute):
        if values.get(name) in ("True", "False"):
            return f"`{_shown(name)}={values[name] != 'True'}`"
        return f"leave out `{_shown(name)}`" if holds else f"give `{_shown(name)}`"
    if isinstance(test, ast.Call) and source.called(test) == "isinstance" and len(test.args) == 2:
        kind, value = source.short(test.args[1], 60), ast.unparse(test.args[0])
        return (
            f"give another type than `{kind}` as `{value}`"
            if holds
            else (f"give a `{kind}` as `{_shown(value)}`")
        )
    if available := re.fullmatch(r"(?:\w+\.)*is_(\w+)_available\(\)", name):
        return "" if holds else f"install `{available[1]}`"
    return ""


def _of_comparison(test: ast.Compare, holds: bool, values: Mapping[str, str]) -> str:
    operator, left, right = type(test.ops[0]), test.left, test.comparators[0]
    wanted = (_NEGATED if holds else _AS_WRITTEN)[operator]
    name, other = ast.unparse(left), ast.unparse(right)
    if wanted == "==" and isinstance(left, ast.BinOp) and isinstance(left.op, ast.Mod):
        return _multiple(ast.unparse(left.left), ast.unparse(left.right), values)
    quotient = re.fullmatch(r"\(?(.+?) // (.+?)\)? \* (.+)", name)
    if wanted == "==" and quotient and quotient[2] == quotient[3]:
        return _multiple(other, quotient[2], values)
    if other == "None":
        return (
            f"set `{_shown(name)}`"
            if wanted in ("is not", "!=")
            else (f"leave out `{_shown(name)}`")
        )
    if wanted in ("in", "not in"):
        listed = values.get(other, other)
        listed = listed if _LISTED.match(listed) else f"`{listed}`"
        return f"make `{_shown(name)}` {'one' if wanted == 'in' else 'none'} of {listed[:200]}"
    if wanted == "==" and isinstance(right, ast.Constant):
        return f"`{_shown(name)}` of {other}"
    return f"make `{_shown(name)} {wanted} {_shown(other)}`"


def _shown(name: str) -> str:
    return name.removeprefix("self.")


def _multiple(first: str, second: str, values: Mapping[str, str]) -> str:
    """`make a a multiple of b`, with the divisors where both are numbers."""
    a, b = (int(t) if re.fullmatch(r"\d+", t := values.get(n, n)) else 0 for n in (first, second))
    said = f"make `{_shown(first)}` a multiple of `{_shown(second)}`"
    if not a or not b or a % b == 0:
        return said
    divisors = sorted((n for n in range(1, a + 1) if a % n == 0), key=lambda n: abs(n - b))[:3]
    near = " or ".join(str(n) for n in (a // b * b, (a // b + 1) * b) if n)
    return f"{said} ({near}; {', '.join(map(str, sorted(divisors)))} divide {a})"


def _place(frame: Frame) -> str:
    owner = f"`{frame.package}`" if frame.package else "Your code" if frame.is_users else "Python"
    return f"{owner} ({frame.place})"
