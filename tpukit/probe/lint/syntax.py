"""What syntax trees are asked for: nodes, in a part of the time of `ast.walk`, calls, arguments."""

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, overload

from tpukit.knowledge.calls import name_group

Node = TypeVar("Node", bound=ast.AST)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
LOOPS = (ast.For, ast.While, ast.AsyncFor)
ELSEWHERE = (*FUNCTIONS, ast.ClassDef, ast.Lambda)
"""What holds code that does not run where it stands."""
NAMED = (ast.Name, ast.Attribute)
LINE_END = re.compile(r"\r\n|\r|\n")
"""As Python counts lines."""
_NO_NODES = {
    "ctx", "op", "ops", "id", "attr", "level", "module", "conversion", "kind", "type_comment",
    "type_ignores",
}  # fmt: skip
"""Fields that neither bind nor use a name."""
_KEPT, _BELOW = "children below", "nodes below"


def _node_types(kind: type[ast.AST]) -> Iterator[type[ast.AST]]:
    yield kind
    for inner in kind.__subclasses__():
        yield from _node_types(inner)


_FIELDS = {
    kind: tuple(name for name in kind._fields if name not in _NO_NODES and kind is not ast.Constant)
    for kind in _node_types(ast.AST)
}
_LEAVES = {ast.Constant, type(None), str, int, bool}
"""What a field or a list of nodes also holds, and constants: they hold no names."""


def children(node: ast.AST) -> list[ast.AST]:
    """The nodes right below a node that may hold names, kept in it: each rule walks the tree."""
    names = _FIELDS[type(node)]
    if not names:
        return []
    fields = node.__dict__
    found: list[ast.AST] | None = fields.get(_KEPT)
    if found is None:
        found = []
        for name in names:
            value = fields.get(name)
            if type(value) is list:
                found += [item for item in value if type(item) not in _LEAVES]
            elif type(value) not in _LEAVES:
                found.append(value)  # type: ignore[arg-type]
        fields[_KEPT] = found
    return found


def nodes_below(node: ast.AST) -> list[ast.AST]:
    """A node of a walked module (`Names`) and all below it that may hold names, in their order."""
    order, start, end = node.__dict__.get(_BELOW, ([node], 0, 1))
    return order[start:end]  # type: ignore[no-any-return]


def keep_below(node: ast.AST, order: list[ast.AST], start: int) -> None:
    """Keeps in a node that those at the end of a list are its own."""
    node.__dict__[_BELOW] = (order, start, len(order))


def forget(tree: ast.Module) -> None:
    """Ends the circle of nodes and their list, which would wait for the garbage collection."""
    for node in tree.__dict__.pop(_BELOW, ((),))[0]:
        node.__dict__.pop(_BELOW, None)


@overload
def of_kind(nodes: Iterable[object], kind: type[Node], /) -> list[Node]: ...
@overload
def of_kind(nodes: Iterable[object], *kinds: type[ast.AST]) -> list[Any]: ...
def of_kind(nodes: Iterable[object], *kinds: type[ast.AST]) -> list[Any]:
    return [node for node in nodes if isinstance(node, kinds)]


def calls_in(node: ast.AST) -> list[ast.Call]:
    return of_kind(nodes_below(node), ast.Call)


def own_nodes(body: Sequence[ast.AST], without: tuple[type[ast.AST], ...]) -> Iterator[ast.AST]:
    """The nodes of a body, without those of some kinds and what they hold."""
    stack = list(body)
    while stack:
        node = stack.pop()
        if not isinstance(node, without):
            yield node
            stack += children(node)


def own_code(body: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """The nodes of a body that run where it does."""
    return own_nodes(body, ELSEWHERE)


def trains(node: ast.AST) -> bool:
    """Whether a function or a loop runs a backward pass."""
    return any(isinstance(n, ast.Attribute) and n.attr == "backward" for n in nodes_below(node))


def is_without_gradients(node: ast.AST) -> bool:
    """A `with torch.no_grad():`, or a function under such a decorator."""
    around = [i.context_expr for i in node.items] if isinstance(node, ast.With) else []
    around += getattr(node, "decorator_list", ())
    return any(re.search(r"\b(?:no_grad|inference_mode)\b", source_text(a)) for a in around)


def without_gradients(nodes: Iterable[ast.AST]) -> set[ast.AST]:
    """The nodes there, and below them."""
    return {n for node in nodes if is_without_gradients(node) for n in nodes_below(node)}


def functions_that(tree: ast.Module, do: Callable[[ast.AST], bool]) -> set[str]:
    """Names of a module's functions that hold such a node, or call one of these."""
    functions = [node for node in nodes_below(tree) if isinstance(node, FUNCTIONS)]
    found = {f.name for f in functions if any(map(do, nodes_below(f)))}
    calls = {f.name: {called_here(n) for n in nodes_below(f)} for f in functions if found}
    while more := {name for name, called in calls.items() if called & found} - found:
        found |= more
    return found


def run_once(tree: ast.Module) -> set[str]:
    """`main`, `__init__`, and functions that the module's own statements call once."""
    parts = (*FUNCTIONS, *LOOPS, ast.ClassDef, ast.Lambda, ast.ListComp, ast.GeneratorExp)
    own = map(called_name, own_nodes(tree.body, parts))
    uses = Counter(getattr(n, "id", getattr(n, "attr", "")) for n in nodes_below(tree))
    return {"main", "__init__"} | {name for name in own if uses[name] == 1}


def called_here(node: ast.AST) -> str:
    """The function of this module that a call may call; empty for methods that others have."""
    name = called_name(node)
    is_own = not method_of(node) or holder(node) == "self"  # type: ignore[arg-type]
    return name if is_own or name not in name_group("methods-of-many") else ""


def called_name(node: ast.AST) -> str:
    """The last part of what a call calls; empty for anything else."""
    function = node.func if isinstance(node, ast.Call) else None
    return str(getattr(function, "attr", "") or getattr(function, "id", ""))


def source_text(node: ast.expr) -> str:
    """An expression as code; empty where it is nested too deeply."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.value, NAMED):
        return f"{source_text(node.value)}.{node.attr}"
    try:
        return ast.unparse(node)
    except (RecursionError, ValueError):
        return ""


def characters(line: str, byte: int) -> int:
    """A column in characters; the syntax tree counts bytes of UTF-8."""
    if line.isascii():
        return byte
    return len(line.encode("utf-8", errors="replace")[:byte].decode("utf-8", errors="replace"))


def is_constant(node: ast.AST | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def argument(call: ast.Call, name: str, position: int | None = None) -> ast.expr | None:
    """An argument, given by its name or its position."""
    given = next((k.value for k in call.keywords if k.arg == name), None)
    if given is None and position is not None and len(call.args) > position:
        return call.args[position]
    return given


def method_of(node: ast.AST) -> str:
    """The method that a call calls; empty for anything else."""
    is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    return node.func.attr if is_method else ""  # type: ignore[attr-defined]


def calls_of(method: str, nodes: Iterable[ast.AST]) -> list[ast.Call]:
    return [n for n in nodes if isinstance(n, ast.Call) and method_of(n) == method]


def holder(call: ast.Call) -> str:
    """What a method is called on, as code."""
    return source_text(call.func.value) if isinstance(call.func, ast.Attribute) else ""
