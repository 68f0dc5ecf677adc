"""The imports of a rewrite: which local name to write, which import to add or to remove."""

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial

from tpukit.probe.lint.finding import Finding
from tpukit.probe.lint.names import Binding, Names, Scope, imported_packages
from tpukit.probe.lint.source import MASK
from tpukit.probe.lint.syntax import FUNCTIONS, nodes_below, of_kind

_SHORT = {"torch_xla.runtime": "xr"}
_BODIES = (*FUNCTIONS, ast.ClassDef)
_CONDITIONS = (ast.If, ast.For, ast.While, ast.ExceptHandler, ast.match_case)
_LONG_TEXT = 200
"""Maximum length in characters of a text that may name something; longer ones are prose."""


@dataclass(frozen=True)
class _Import:
    """One import statement, and the functions and classes around it."""

    node: ast.Import | ast.ImportFrom
    around: tuple[ast.AST, ...]
    certain: bool = True
    """It runs whenever the code around it does: it stands under no condition."""

    def local_name(self, module: str) -> str | None:
        """The name of a module in the code below this import."""
        for alias in self.node.names:
            if isinstance(self.node, ast.ImportFrom):
                if not self.node.level and f"{self.node.module}.{alias.name}" == module:
                    return alias.asname or alias.name
            elif alias.asname is None and f"{alias.name}.".startswith(f"{module}."):
                return module
            elif alias.asname is not None and alias.name == module:
                return alias.asname
        return None


class ImportEdits:
    """Decides how a module's code spells the new names, and which imports they need."""

    def __init__(self, names: Names) -> None:
        self.names = names
        self.insertions: list[tuple[int, str]] = []
        """Statements to write, each below the one that starts at a line (0: at the head)."""
        self._imports = list(_imports_in(names))
        self._around = cache(partial(_around, names.tree))

    def spell(self, name: str, module: str, line: int) -> str | None:
        """The spelling of `name` (of `module`) on a line; adds an import where there is none.

        None where the name to bind means something else in some scope.
        """
        local = self._local_name(module, line) or self._add_import(module, line)
        return None if local is None else local + name[len(module) :]

    def spell_member(self, module: str, member: str, line: int) -> str | None:
        """The spelling of a class or function of a module: imported itself, or through it."""
        for name, bindings in self.names.module.bindings.items():
            if any((b.name or "").endswith(f".{member}") for b in bindings):
                return name
        local = self._local_name(module, line)
        if local is not None:
            return f"{local}.{member}"
        if self._all_bindings(member):
            return None
        self._insert(module, f"from {module} import {member}", line)
        return member

    def at_head(self) -> list[str]:
        """The imports to write at the head of the module."""
        return [statement for line, statement in self.insertions if line == 0]

    def doubled(self) -> set[ast.alias]:
        """Plain imports at module level that an insertion above makes superfluous."""
        body = self.names.tree.body
        top = {0, *(s.lineno for s in of_kind(body, ast.Import, ast.ImportFrom))}
        planned = {statement: line for line, statement in self.insertions if line in top}
        plain = [(s.lineno, a) for s in of_kind(body, ast.Import) for a in s.names if not a.asname]
        return {a for line, a in plain if planned.get(f"import {a.name}", line) < line}

    def unused(
        self,
        after: ast.Module,
        rewritten: list[Finding],
        lines: Sequence[str],
        leaving: str = "",
    ) -> set[ast.alias]:
        """Imported names that nothing uses any more.

        after: the module with its places rewritten. leaving: a package whose plain imports count
        too, and those that nothing used.
        """
        quoted = _quoted_words(self.names.tree, lines)
        places = [p for p in rewritten if p.fix and (p.fix.to or p.fix.call or p.fix.use)]
        nodes = {place.node for place in places}
        roots = {re.split(r"\W", lines[place.line - 1][place.column - 1 :])[0] for place in places}
        old, new = (of_kind(ast.walk(tree), *FUNCTIONS) for tree in (self.names.tree, after))
        then: dict[ast.AST, ast.AST] = dict(zip(old, new, strict=True))
        unused: set[ast.alias] = set()
        for known in self._imports:
            inner = known.around[-1] if known.around else self.names.tree
            read, bound = _names_used(then.get(inner, after))
            for alias in known.node.names:
                is_plain = isinstance(known.node, ast.Import) and alias.asname is None
                local = alias.asname or alias.name.partition(".")[0]
                package = ast.Import([alias]) if isinstance(known.node, ast.Import) else known.node
                is_left = leaving in imported_packages(package)
                goes = alias in nodes or (local in roots and local not in bound)
                if local not in read and (
                    is_left or (goes and not is_plain and local not in quoted)
                ):
                    unused.add(alias)
        return unused

    # -- what is there ----------------------------------------------------------------------------
    def _local_name(self, module: str, line: int) -> str | None:
        """The module's name on a line, by an import that has run by then."""
        root = module.partition(".")[0]
        visible = self._visible(line)
        only_certain = any(k.certain and root in imported_packages(k.node) for k in visible)
        for known in visible:
            name = known.local_name(module) if known.certain or not only_certain else None
            if name is not None and not self._is_shadowed(name.partition(".")[0]):
                return name
        return None

    def _visible(self, line: int) -> list[_Import]:
        """The imports above a line, in the functions around it or at module level."""
        around = self._around(line)
        above = (known for known in self._imports if known.node.lineno < line)
        return [known for known in above if known.around == around[: len(known.around)]]

    # -- what is added ----------------------------------------------------------------------------
    def _add_import(self, module: str, line: int) -> str | None:
        short = _SHORT.get(module)
        if short and all(b.name == module for found in self._all_bindings(short) for b in found):
            self._insert(module, f"import {module} as {short}", line)
            return short
        root = module.partition(".")[0]
        if any(b.name != root for bindings in self._all_bindings(root) for b in bindings):
            return None
        self._insert(module, f"import {module}", line)
        return module

    def _insert(self, module: str, statement: str, line: int) -> None:
        """Adds an import behind one of the same package, at module level or in the function."""
        insertion = self._line_beside(module, line), statement
        if insertion not in self.insertions:
            self.insertions.append(insertion)

    def _line_beside(self, module: str, line: int) -> int:
        inside = bool(self._around(line))
        later = [k for k in self._imports if not k.around] if inside else []
        for candidates in (self._visible(line), later):
            for package in (module.partition(".")[0], "torch_xla", "torch"):
                beside = [k for k in candidates if package in imported_packages(k.node)]
                if beside:
                    return min(beside, key=_order).node.lineno
        return 0

    def _is_shadowed(self, name: str) -> bool:
        """Whether a scope binds the name to something other than an import."""
        return any(b.name is None for bindings in self._all_bindings(name) for b in bindings)

    def _all_bindings(self, name: str) -> list[list[Binding]]:
        scopes: list[Scope] = [self.names.module, *self.names.scopes.values()]
        return [scope.bindings[name] for scope in scopes if name in scope.bindings]


def _order(known: _Import) -> tuple[bool, int, int]:
    """Imports that always run first, those of the module before those of functions."""
    depth = len(known.around)
    return not known.certain, depth if known.certain else -depth, known.node.lineno


def _imports_in(names: Names) -> Iterator[_Import]:
    """Every import, in order, with the functions and classes around it."""
    for node in of_kind(nodes_below(names.tree), ast.Import, ast.ImportFrom):
        outer = names.outer(node, *_BODIES, *_CONDITIONS)
        around = tuple(of_kind(outer[::-1], *_BODIES))
        yield _Import(node, around, not (outer and isinstance(outer[0], _CONDITIONS)))


def _around(tree: ast.Module, line: int) -> tuple[ast.AST, ...]:
    """The functions whose bodies hold a line, outermost first, and the classes around those."""
    return tuple(n for n in of_kind(ast.walk(tree), *_BODIES)
                 if n.body[0].lineno <= line <= n.end_lineno)  # fmt: skip


def _names_used(tree: ast.AST) -> tuple[set[str], set[str]]:
    """The names that a module or function reads, and those that it assigns."""
    names = of_kind(ast.walk(tree), ast.Name)
    read = {node.id for node in names if isinstance(node.ctx, ast.Load)}
    return read, {node.id for node in names if not isinstance(node.ctx, ast.Load)}


def _quoted_words(tree: ast.Module, lines: Sequence[str]) -> set[str]:
    """Words in texts (`__all__`, annotations) and in a notebook's magics."""
    texts = [n.value for n in of_kind(ast.walk(tree), ast.Constant)]
    masked = [line for line in lines if MASK in line]
    short = [text for text in texts if isinstance(text, str) and len(text) < _LONG_TEXT]
    return set(re.findall(r"\w+", " ".join([*short, *masked])))
