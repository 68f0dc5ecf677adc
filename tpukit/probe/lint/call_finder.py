"""Finds the uses of removed and deprecated calls in a module's syntax tree."""

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from typing import Any

from tpukit.knowledge.calls import CallTable, Fix, OldCall
from tpukit.probe.lint.cuda_forms import find_cuda_forms
from tpukit.probe.lint.finding import Finding
from tpukit.probe.lint.guards import has_alternative, is_guarded
from tpukit.probe.lint.names import Names
from tpukit.probe.lint.old_forms import find_old_forms
from tpukit.probe.lint.rewriting.fixability import left_alone, other_meaning, taken_away
from tpukit.probe.lint.shell_lines import (
    SHELL_CALLS,
    WRITERS,
    Span,
    find_in_command,
    find_in_shell_lines,
    only_set,
    variable_row,
    variables_set,
)
from tpukit.probe.lint.source import Module
from tpukit.probe.lint.syntax import NAMED, nodes_below, source_text

_Place = ast.expr | ast.alias | ast.stmt
_MAY_BE_TEXT = re.compile(r"^['\"]|(?i:kind)")


def find_calls(module: Module, names: Names, table: CallTable) -> list[Finding]:
    """Every use of a row of the table in a parsed module."""
    assert module.tree is not None
    finder = _Finder(module, names, table)
    for node in nodes_below(module.tree):
        if visit := finder.visits.get(type(node)):
            visit(node)
    finder.unused_imports()
    finder.old_forms()
    finder.shell_lines()
    return finder.places


class _Finder:
    """Takes the nodes of a module in their order."""

    def __init__(self, module: Module, names: Names, table: CallTable) -> None:
        self.module = module
        self.names = names
        self.table = table
        self.places: list[Finding] = []
        self._set_here: set[str] = set()
        """Environment variables that the lines above set."""
        self._other_meaning = cache(partial(other_meaning, names))
        self._loaded: set[str] = set()
        self._imported: list[tuple[str, ast.alias, OldCall, str]] = []
        self._methods = table.lasts | SHELL_CALLS | {name.rpartition(".")[2] for name in WRITERS}

        self.visits: dict[type[ast.AST], Callable[[Any], None]] = {
            ast.Name: self._name, ast.Attribute: self._attribute, ast.Call: self._call,
            ast.Import: self._import, ast.ImportFrom: self._import_from,
            ast.Subscript: self._environment_item,
        }  # fmt: skip

    def _meanings(self, node: ast.expr, at: ast.AST) -> list[str]:
        return self.names.resolve(node, self.names.scope_of(at))

    # -- names ------------------------------------------------------------------------------------
    def _name(self, node: ast.Name) -> None:
        if type(node.ctx) is ast.Load:
            self._loaded.add(node.id)
            # An alias made by an assignment is reported at the assignment.
            if node.id in self.names.followed or self.names.has_stars:
                self._use(node)

    def _attribute(self, node: ast.Attribute) -> None:
        if node.attr in self.table.lasts and type(node.ctx) is ast.Load:
            meanings = self._use(node)
            modules = [m for m in meanings if m in self.table.modules]
            if modules and len(modules) == len(meanings):
                self._found(node, self.table.modules[modules[0]], modules[0])

    def _use(self, node: ast.Name | ast.Attribute) -> list[str]:
        meanings = self._meanings(node, node)
        for row, name in self._rows(meanings):
            if row.kind in ("name", "attribute"):
                self._found(node, row, name)
        return meanings

    def _rows(self, meanings: Sequence[str]) -> Iterator[tuple[OldCall, str]]:
        """Rows for a name, unless it may also mean something else."""
        if meanings and all(meaning in self.table.by_name for meaning in meanings):
            for row in self.table.by_name[meanings[0]]:
                yield row, meanings[0]

    def _getattr(self, node: ast.Call) -> None:
        """`getattr(xm, "xla_device")` is a use; with a default it is a feature check."""
        if isinstance(node.func, ast.Name) and node.func.id == "getattr" and len(node.args) == 2:
            for row, name in self._rows(self._meanings(node, node)):
                if row.kind == "name":
                    self._found(node, row, name, fixable=False)

    def _call(self, node: ast.Call) -> None:
        self._getattr(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr not in self._methods:
            return
        meanings = self._meanings(node.func, node)
        for row, name in self._rows(meanings):
            if row.kind == "call" and _applies(row, node, self.names):
                self._found(node.func, row, name)
        if any(meaning in WRITERS for meaning in meanings):
            for key, row, name in variables_set(node, self.table):
                self._set_here.add(name)
                self._found(key, row, name, within=node)
        if isinstance(node.func, ast.Attribute) and node.func.attr in SHELL_CALLS:
            self._shell_call(node)

    # -- imports ----------------------------------------------------------------------------------
    def _import(self, node: ast.Import) -> None:
        for alias in node.names:
            row, name = self._module_row(alias.name)
            if row is not None:
                self._found(alias, row, name)

    def _import_from(self, node: ast.ImportFrom) -> None:
        if node.level or node.module is None:
            return
        row, name = self._module_row(node.module)
        if row is not None:
            self._found(node, row, name)
            return
        for alias in node.names:
            full = f"{node.module}.{alias.name}"
            row, name = self._module_row(full)
            if row is not None:
                self._found(alias, row, name)
            for known in self.table.by_name.get(full, ()):
                if known.kind != "name" or known.id in self.table.moves:
                    continue  # an import alone needs no other device
                if known.status == "removed":
                    self._found(alias, known, full)
                else:
                    self._imported.append((alias.asname or alias.name, alias, known, full))

    def _module_row(self, name: str) -> tuple[OldCall | None, str]:
        parts = name.split(".")
        for count in range(len(parts), 0, -1):
            prefix = ".".join(parts[:count])
            if prefix in self.table.modules:
                return self.table.modules[prefix], prefix
        return None, ""

    def unused_imports(self) -> None:
        """Reports deprecated names that are imported but not used (re-exported, say)."""
        for local, alias, row, full in self._imported:
            if local not in self._loaded:
                self._found(alias, row, full)

    # -- environment variables --------------------------------------------------------------------
    def _environment_item(self, node: ast.Subscript) -> None:
        row = variable_row(node.slice, self.table)
        if row is None or self._meanings(node.value, node) != ["os.environ"]:
            return
        name = str(node.slice.value)  # type: ignore[attr-defined]
        if isinstance(node.ctx, ast.Store):
            self._set_here.add(name)
            self._found(node, only_set(row), name)
        elif row.status == "removed" and name not in self._set_here:
            self._found(node, row, name)

    def old_forms(self) -> None:
        """Old forms of calls that have no qualified name."""
        if any(form.search(self.module.text) for form in self.table.forms):
            forms = find_old_forms(self.names)
            if {"cuda-text", "move-device-text"} & self.table.by_form.keys():
                forms = chain(forms, find_cuda_forms(self.names))
            for node, id, text in forms:
                row = self.table.by_form.get(id)
                if row is not None:
                    is_text = row.fix is not None and row.fix.special == "text"
                    fix = None if is_text and isinstance(node, ast.Name) else row.fix
                    self._add(row, node, text, text, fix)

    def shell_lines(self) -> None:
        """Commands and variables in a notebook's magics and shell lines."""
        for row, span, old, name in find_in_shell_lines(self.module, self.table):
            self._add(only_set(row), span, old, name)

    def _shell_call(self, node: ast.Call) -> None:
        """`os.system("...")`, and what a notebook's export makes of shell lines."""
        text = node.args[-1] if node.args else None
        if isinstance(text, ast.Constant) and isinstance(text.value, str):
            for row, old, name in find_in_command(text.value, self.table):
                self._add(only_set(row), text, old, name.group())

    # -- places -----------------------------------------------------------------------------------
    def _found(
        self,
        node: _Place,
        row: OldCall,
        name: str,
        *,
        fixable: bool = True,
        within: ast.Call | None = None,
    ) -> None:
        """within: the call of which a constant is an argument."""
        is_import = isinstance(node, ast.alias | ast.ImportFrom)
        at = within or node
        # A test of a release says nothing about another device.
        if row.id not in self.table.moves and is_guarded(self.names, at, row, name):
            return
        shown = {"file": self.module.text, "line": self.module.lines[node.lineno - 1]}
        if any(re.search(text, shown[k]) for k in shown for text in row.unless.get(k, ())):
            return
        if is_import and row.status == "removed" and has_alternative(self.names, at):
            return
        fix = row.fix if fixable else None
        call = self.names.call_of(node)
        remark = taken_away(row, call)
        if fix is not None and isinstance(node, NAMED):
            reason = left_alone(fix, call) or self._other_meaning(fix.imports)
            fix, remark = (None, f"not fixed: {reason}") if reason else (fix, remark)
        used = [name.rpartition(".")[2], *(k.arg or "" for k in (call.keywords if call else ()))]
        new = "; ".join(row.instead[one] for one in used if one in row.instead) or row.new
        old = _as_used(row, name, call)
        self._add(replace(row, new=new), node, old, name, fix, remark)

    def _add(
        self,
        row: OldCall,
        at: _Place | Span,
        old: str,
        name: str,
        fix: Fix | None = None,
        remark: str = "",
    ) -> None:
        """at: a node, or a span in a shell line."""
        node, span = (None, at) if isinstance(at, tuple) else (at, self.module.span(at))
        place = Finding(
            *span, row.id, old, row.new, row.since, row.status, row.effect, remark, fix, name, node
        )
        if place not in self.places:
            self.places.append(place)


def _as_used(row: OldCall, name: str, call: ast.Call | None) -> str:
    """The row's text where the row has one name; else the name that was used, and the keywords."""
    is_of_many = len(row.names) > 3 and bool(row.keywords or row.lacks)
    if row.kind == "call" and (is_of_many or len(row.keywords) > 1):
        given = [k.arg for k in call.keywords if k.arg in row.keywords] if call else []
        shown = ", ".join(f"{keyword}=..." for keyword in given or row.keywords[:1])
        return f"{name.rpartition('.')[2]}({shown})"
    if name.startswith("torch_xla.core.xla_model."):
        return f"xm.{name.rpartition('.')[2]}()"
    if len(row.names) == 1 or row.keywords or row.lacks or row.kind == "attribute":
        return row.old
    return name


# -- conditions of a row -------------------------------------------------------------------------
def _applies(row: OldCall, node: ast.Call, names: Names) -> bool:
    """Whether a call row's conditions hold for a call."""
    given = {keyword.arg: keyword.value for keyword in names.keywords(node)}
    if row.lacks:
        written = {k for k, v in given.items() if source_text(v) not in row.unless.get(str(k), ())}
        lacking = not set(row.lacks) & set(given) or bool(row.unless and set(row.lacks) & written)
        by_position = row.position is not None and len(node.args) > row.position
        return None not in given and lacking and not by_position
    if row.positional:
        return len(node.args) + len(node.keywords) >= row.positional
    if not row.keywords:
        return True
    values = [(name, given[name]) for name in row.keywords if name in given]
    if row.position is not None:
        before = node.args[: row.position + 1]
        if len(before) > row.position and not any(isinstance(a, ast.Starred) for a in before):
            values.append((row.keywords[0], before[-1]))
    possible = ((name, set(map(source_text, names.possible(value)))) for name, value in values)
    return any(
        not texts <= set(row.unless.get(name, ()))
        and (not row.texts or name in given or any(map(_MAY_BE_TEXT.search, texts)))
        for name, texts in possible
    )
