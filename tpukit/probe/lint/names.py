"""Resolves an expression to qualified names through imports, aliases, assignments and scopes.

import torch_xla.core.xla_model as xm      xm.xla_device   -> torch_xla.core.xla_model.xla_device
accelerator = Accelerator()                accelerator.x   -> accelerate.Accelerator().x
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tpukit.knowledge.calls import rule_data
from tpukit.probe.lint.syntax import ELSEWHERE, NAMED, children, keep_below, of_kind

_MOST_STEPS = 12
"""Maximum length of a chain of aliases, so that a cycle ends."""
_IMPORTS = (ast.Import, ast.ImportFrom)
_ASSIGNMENTS = (ast.Assign, ast.AnnAssign, ast.NamedExpr)
_PLAIN_TEXTS = (ast.ExceptHandler, ast.MatchAs, ast.MatchStar, ast.MatchMapping)
_DECLARATIONS = (ast.Global, ast.Nonlocal)
_BIND_NOTHING = {
    ast.Assign, ast.BinOp, ast.BoolOp, ast.Call, ast.Compare, ast.Constant, ast.Dict, ast.Expr,
    ast.For, ast.If, ast.List, ast.Return, ast.Subscript, ast.Tuple, ast.arguments, ast.keyword,
}  # fmt: skip
"""The most frequent of the nodes that bind no name themselves."""
_WITH_ROOT = (ast.Attribute, ast.Call)
_SCOPES = (*ELSEWHERE, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass
class Binding:
    """What one statement binds a name to."""

    name: str | None = None
    """A qualified name, from an import."""
    value: ast.expr | None = None
    """An expression, from an assignment."""
    instance: bool = False
    """The name is an instance of what `value` names (an annotated parameter)."""


@dataclass
class Scope:
    """The names that one module, class or function binds."""

    parent: Scope | None
    is_class: bool = False
    bindings: dict[str, list[Binding]] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)
    """Modules whose names were imported with `*`."""
    outer: set[str] = field(default_factory=set)
    """Names declared global or nonlocal."""

    def bind(self, name: str, binding: Binding) -> None:
        self.bindings.setdefault(name, []).append(binding)


class Names:
    """The scopes of a module, and what names mean in them."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.parents: dict[ast.AST, ast.AST] = {}
        self.module = Scope(None)
        self.scopes: dict[ast.AST, Scope] = {tree: self.module}
        self.attributes: dict[str, list[tuple[ast.expr, Scope]]] = {}
        """Values of `self.x = value` anywhere by `x`, of `args.x = value` by `args.x`."""
        self._followed_now: set[tuple[int, str]] = set()
        self.followed: set[str] = set()
        """Local names that an import binds somewhere in the module."""
        self.packages: set[str] = set()
        """What the module imports, also within its functions."""
        self._walk(tree, self.module, [])
        self.has_stars = any(scope.stars for scope in self.scopes.values())
        self._binding: dict[str, list[Scope]] = {}
        """Name -> the scopes that bind it."""
        for scope in self.scopes.values():
            for name in scope.bindings:
                self._binding.setdefault(name, []).append(scope)

    # -- what stands around a node ----------------------------------------------------------------
    def around(self, node: ast.AST) -> Iterator[tuple[Any, ast.AST]]:
        """The nodes around a node, innermost first, each with the one inside it."""
        while node in self.parents:
            yield self.parents[node], node
            node = self.parents[node]

    def outer(self, node: ast.AST, *kinds: type[ast.AST]) -> list[Any]:
        """The nodes of some kinds around a node, innermost first."""
        return of_kind((outer for outer, _ in self.around(node)), *kinds)

    def call_of(self, function: ast.AST) -> ast.Call | None:
        """The call of which a node is the function."""
        call = self.parents.get(function)
        return call if isinstance(call, ast.Call) and call.func is function else None

    def scope_of(self, node: ast.AST) -> Scope:
        while node not in self.scopes:
            node = self.parents[node]
        return self.scopes[node]

    # -- what a name means ------------------------------------------------------------------------
    def resolve(self, node: ast.expr, scope: Scope, steps: int = _MOST_STEPS) -> list[str]:
        """Every qualified name that an expression may mean; empty where that is unknown."""
        if steps <= 0:
            return []
        if isinstance(node, ast.Name):
            return self._lookup(node.id, scope, steps - 1)
        if isinstance(node, ast.Attribute):
            return self._attribute(node, scope, steps)
        if isinstance(node, ast.Call):
            return self._call(node, scope, steps)
        return []

    def anywhere(self, node: ast.expr) -> list[str]:
        """As `resolve`, in the first scope that knows the name; enough for a whole file."""
        root = node
        while isinstance(root, _WITH_ROOT):
            root = root.value if isinstance(root, ast.Attribute) else root.func
        if not isinstance(root, ast.Name):
            return []
        if root.id in ("self", "cls") or self.has_stars:
            return self.resolve(node, self.module)
        found = (self.resolve(node, scope) for scope in self._binding.get(root.id, ()))
        return next(filter(None, found), [])

    def values(self, name: str) -> list[ast.expr | None]:
        """What a name is assigned, in every scope that binds it; None where that is unknown."""
        return [b.value for s in self._binding.get(name, ()) for b in s.bindings[name]]

    def possible(self, node: ast.expr, steps: int = 3) -> list[ast.expr]:
        """What an expression may stand for, through names and conditions; itself where unknown."""
        found: Sequence[ast.expr | None] = ()
        if isinstance(node, ast.IfExp | ast.BoolOp):
            found = node.values if isinstance(node, ast.BoolOp) else (node.body, node.orelse)
        elif isinstance(node, ast.Name):
            found = self.values(node.id)
        elif key := _attribute_key(node):
            found = [value for value, _ in self.attributes.get(key, ())]
        if not found or not steps:
            return [node]
        return [p for v in found for p in ([node] if v is None else self.possible(v, steps - 1))]

    def keywords(self, call: ast.Call) -> list[ast.keyword]:
        """The arguments by name, with those of `**name` where that is a dict of the module."""
        given: list[ast.keyword] = []
        for keyword in call.keywords:
            value = self.possible(keyword.value)[-1] if keyword.arg is None else None
            if isinstance(value, ast.Call) and ast.unparse(value.func) == "dict":
                given += value.keywords
            elif isinstance(value, ast.Dict):
                pairs = zip(value.keys, value.values, strict=True)
                given += [ast.keyword(getattr(k, "value", None), v) for k, v in pairs]
            else:
                given.append(keyword)
        return given

    def _attribute(self, node: ast.Attribute, scope: Scope, steps: int) -> list[str]:
        if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
            values = self.attributes.get(node.attr, [])
            return [q for value, where in values[:4] for q in self.resolve(value, where, steps - 1)]
        return [f"{base}.{node.attr}" for base in self.resolve(node.value, scope, steps)]

    def _call(self, node: ast.Call, scope: Scope, steps: int) -> list[str]:
        if isinstance(node.func, ast.Name) and node.func.id == "getattr" and len(node.args) >= 2:
            name = node.args[1]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                return [f"{b}.{name.value}" for b in self.resolve(node.args[0], scope, steps - 1)]
        return [f"{function}()" for function in self.resolve(node.func, scope, steps - 1)]

    def _lookup(self, name: str, scope: Scope, steps: int) -> list[str]:
        where: Scope | None = scope
        first = True
        while where is not None:
            visible = first or not where.is_class
            if visible and name in where.bindings and name not in where.outer:
                return self._once(name, where, steps)
            first, where = False, where.parent
        if hasattr(builtins, name):
            # A star import that shadows a built-in is rare.
            return []
        by_stars = [f"{module}.{name}" for module in self._stars(scope)]
        customary = rule_data("customary").get(name) if by_stars else None
        return [customary] if customary else by_stars

    def _once(self, name: str, scope: Scope, steps: int) -> list[str]:
        """The meanings of a name; none for `x` inside `x = x.view(...)`, which would recur."""
        key = (id(scope), name)
        if key in self._followed_now:
            return []
        self._followed_now.add(key)
        try:
            return self._meanings(scope.bindings[name], scope, steps)
        finally:
            self._followed_now.discard(key)

    def _meanings(self, bindings: list[Binding], scope: Scope, steps: int) -> list[str]:
        imported = [binding.name for binding in bindings if binding.name is not None]
        if imported:
            return list(dict.fromkeys(imported))
        found: list[str] = []
        for binding in (*bindings[:3], *bindings[3:][-1:]):
            if binding.value is not None:
                meanings = self.resolve(binding.value, scope, steps)
                found += [f"{m}()" for m in meanings] if binding.instance else meanings
        return list(dict.fromkeys(found))

    def _stars(self, scope: Scope | None) -> Iterator[str]:
        while scope is not None:
            yield from scope.stars
            scope = scope.parent

    # -- what binds a name ------------------------------------------------------------------------
    def _walk(self, node: ast.AST, scope: Scope, order: list[ast.AST]) -> None:
        """The one walk of the module: scopes, parents, and the order of the nodes."""
        start = len(order)
        order.append(node)
        if type(node) not in _BIND_NOTHING and type(getattr(node, "ctx", None)) is not ast.Load:
            scope = self._bound(node, scope)
        below = children(node)
        for child in below:
            self.parents[child] = node
            self._walk(child, scope, order)
        if below:
            keep_below(node, order, start)

    def _bound(self, node: ast.AST, scope: Scope) -> Scope:
        """Binds the names of a node in a scope; the scope of what is below the node."""
        if isinstance(node, NAMED):
            outer = self.parents[node]
            value = outer.value if isinstance(outer, _ASSIGNMENTS) else None
            if isinstance(node, ast.Name):
                scope.bind(node.id, Binding(value=value))
            elif value is not None and (key := _attribute_key(node)):
                self.attributes.setdefault(key, []).append((value, scope))
        elif isinstance(node, _IMPORTS):
            self.followed.update(_bind_import(node, scope))
            self.packages |= imported_packages(node)
        elif isinstance(node, ast.arg):
            annotated = _annotated_class(node.annotation)
            scope.bind(node.arg, Binding(value=annotated, instance=annotated is not None))
        elif isinstance(node, _DECLARATIONS):
            scope.outer.update(node.names)
        elif isinstance(node, _PLAIN_TEXTS):
            if name := getattr(node, "name", None) or getattr(node, "rest", None):
                scope.bind(name, Binding())
        elif isinstance(node, _SCOPES):
            if name := getattr(node, "name", ""):
                scope.bind(name, Binding())
            self.scopes[node] = Scope(scope, is_class=isinstance(node, ast.ClassDef))
            return self.scopes[node]
        return scope


def _attribute_key(node: ast.expr) -> str:
    """`x` of `self.x`, `args.x` of another object's; empty for anything else."""
    if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
        return ""
    return node.attr if node.value.id in ("self", "cls") else f"{node.value.id}.{node.attr}"


def imported_packages(node: ast.Import | ast.ImportFrom) -> set[str]:
    """The packages that an import statement names."""
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    return set() if node.level else {(node.module or "").partition(".")[0]}


def _bind_import(node: ast.Import | ast.ImportFrom, scope: Scope) -> list[str]:
    """Binds an import's names and returns them."""
    bound = []
    for alias in node.names:
        local, name = _imported(node, alias)
        if alias.name == "*" and name is not None:
            scope.stars.append(name.rpartition(".")[0])
        else:
            scope.bind(local, Binding(name=name))
            bound.append(local)
    return bound


def _imported(node: ast.Import | ast.ImportFrom, alias: ast.alias) -> tuple[str, str | None]:
    """(local name, qualified name) of one imported name; None for a relative import."""
    if isinstance(node, ast.Import):
        name = alias.name if alias.asname else alias.name.partition(".")[0]
        return alias.asname or name, name
    is_relative = node.level or node.module is None
    return alias.asname or alias.name, None if is_relative else f"{node.module}.{alias.name}"


def _annotated_class(annotation: ast.expr | None) -> ast.expr | None:
    """The class an annotation names: `Accelerator`, `"Accelerator"`, `Accelerator | None`."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        try:
            annotation = ast.parse(annotation.value, mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None
    if isinstance(annotation, ast.BinOp):
        return _annotated_class(annotation.left)
    if isinstance(annotation, ast.Subscript):
        head = annotation.value
        is_optional = isinstance(head, ast.Name) and head.id == "Optional"
        return _annotated_class(annotation.slice) if is_optional else None
    return annotation if isinstance(annotation, ast.Name | ast.Attribute) else None
