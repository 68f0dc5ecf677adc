"""Plans the imports of a rewrite: which local name to write, which import to add or remove."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from tpukit.probe.lint.finding import ModuleFinding
from tpukit.probe.lint.names import Binding, Names, Scope, imported_packages

_SHORT = {"torch_xla.runtime": "xr"}


@dataclass
class Insertion:
    """An import to write behind the statement that starts at a line."""

    after_line: int
    """0: at the head of the module."""
    statement: str


@dataclass
class ImportPlanner:
    """Decides how a module's code spells the new names."""

    tree: ast.Module
    names: Names
    insertions: list[Insertion] = field(default_factory=list)

    def spell(self, name: str, module: str) -> str | None:
        """How to write `name` (of `module`) here; plans an import where there is none.

        None where the name to bind means something else in some scope.
        """
        local = self._local_name(module)
        if local is None:
            local = self._add_import(module)
        return None if local is None else local + name[len(module) :]

    def spell_member(self, module: str, member: str) -> str | None:
        """How to write a class or function of a module: imported itself, or through it."""
        for name, bindings in self.names.module.bindings.items():
            if any((b.name or "").endswith(f".{member}") for b in bindings):
                return name
        local = self._local_name(module)
        if local is not None:
            return f"{local}.{member}"
        if self._all_bindings(member):
            return None
        self._insert(module, f"from {module} import {member}")
        return member

    def _local_name(self, module: str) -> str | None:
        """The module's name at module level: bound itself, or through its package."""
        for name, bindings in self.names.module.bindings.items():
            if any(b.name == module for b in bindings) and not self._is_shadowed(name):
                return name
        parent, _, last = module.rpartition(".")
        if parent and self._imports(module):
            local = self._local_name(parent)
            return f"{local}.{last}" if local else None
        return None

    def _imports(self, module: str) -> bool:
        """Whether `import module` (without a new name) stands at module level."""
        return any(
            alias.name == module and alias.asname is None
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Import)
            for alias in node.names
        )

    def _add_import(self, module: str) -> str | None:
        short = _SHORT.get(module)
        if short and not self._all_bindings(short):
            self._insert(module, f"import {module} as {short}")
            return short
        root = module.partition(".")[0]
        if any(b.name != root for bindings in self._all_bindings(root) for b in bindings):
            return None
        self._insert(module, f"import {module}")
        return module

    def _insert(self, module: str, statement: str) -> None:
        """Plans an import after those of the same package: at module level, or else in every
        function that imports it."""
        root = module.partition(".")[0]
        candidates = (_import_lines(self.tree, name) for name in (root, "torch_xla", "torch"))
        lines = next(filter(None, candidates), [0])
        for line in lines:
            insertion = Insertion(line, statement)
            if insertion not in self.insertions:
                self.insertions.append(insertion)

    def _is_shadowed(self, name: str) -> bool:
        """Whether a scope binds the name to something other than an import."""
        return any(b.name is None for bindings in self._all_bindings(name) for b in bindings)

    def _all_bindings(self, name: str) -> list[list[Binding]]:
        scopes: list[Scope] = [self.names.module, *self.names.scopes.values()]
        return [scope.bindings[name] for scope in scopes if name in scope.bindings]


def _import_lines(tree: ast.Module, package: str) -> list[int]:
    """Where to import beside a package: its first import, or else each one in a function."""
    top: list[int] = []
    inner: list[int] = []
    stack: list[tuple[ast.AST, list[int]]] = [(tree, top)]
    while stack:
        node, lines = stack.pop()
        if isinstance(node, ast.Import | ast.ImportFrom) and package in imported_packages(node):
            lines.append(node.lineno)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            lines = inner
        stack.extend((child, lines) for child in ast.iter_child_nodes(node))
    return sorted(top)[:1] or sorted(inner)


def unused_imports(tree: ast.Module, rewritten: list[ModuleFinding]) -> set[tuple[int, int]]:
    """(line, column) of imported names that are unused after the rewrite.

    Columns are those of the syntax tree.
    """
    uses: dict[str, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            uses[node.id] = uses.get(node.id, 0) + 1
    exported = {c.value for n in ast.walk(tree) for c in _exports(n)}
    unused: set[tuple[int, int]] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or node.level:
            continue
        for alias in node.names:
            full = f"{node.module}.{alias.name}"
            local = alias.asname or alias.name
            same = [p for p in rewritten if p.name == full and p.fix and p.fix.to]
            here = sum(p.end_column - p.column == len(local) and p.end_line == p.line for p in same)
            at_import = any(p.line == alias.lineno and p.column == alias.col_offset for p in same)
            if same and uses.get(local, 0) <= here - at_import and local not in exported:
                unused.add((alias.lineno, alias.col_offset))
    return unused


def _exports(node: ast.AST) -> list[ast.Constant]:
    """The texts of `__all__ = [...]`."""
    if isinstance(node, ast.Assign) and any(
        isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets
    ):
        return [c for c in ast.walk(node.value) if isinstance(c, ast.Constant)]
    return []
