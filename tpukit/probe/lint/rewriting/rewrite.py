"""Rewrites the places that have one replacement with libcst: every other character stays."""

import ast
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider

from tpukit.knowledge.calls import Fix
from tpukit.probe.lint.finding import ModuleFinding
from tpukit.probe.lint.names import Names
from tpukit.probe.lint.rewriting.call_arguments import (
    MOVES,
    code_of,
    expression,
    keyword_argument,
    mixed_precision,
    moved_call,
    moved_text,
    new_arguments,
    with_arguments,
)
from tpukit.probe.lint.rewriting.edits import ImportEdits, unused_imports
from tpukit.probe.lint.source import parse_python

Position = tuple[int, int]
_PYTHON_TYPES = {"unicode": "str"}
_LOADER_KEYWORDS = ("dispatch_batches", "even_batches", "use_seedable_sampler")


def rewrite(
    text: str,
    tree: ast.Module,
    places: Sequence[ModuleFinding],
    *,
    exports: bool = False,
    leaving: str = "",
) -> tuple[str, list[ModuleFinding]]:
    """The module's text with every place that has a fix rewritten where possible, and those.

    exports: other modules import names from this one, so unused imports stay.
    leaving: a package whose imports go with their last use, also plain ones.
    """
    wanted = [place for place in places if place.fix is not None]
    if not wanted:
        return text, []
    try:
        module = MetadataWrapper(cst.parse_module(text), unsafe_skip_copy=True)
    except (cst.ParserSyntaxError, RecursionError, ValueError):
        return text, []
    imports = ImportEdits(tree, Names(tree))
    # Whether a call can be rewritten is known only at the call: a first pass finds out.
    trial: list[ModuleFinding] = []
    after, _ = parse_python(module.visit(_Rewriter(wanted, imports, trial)).code)
    if not trial or after is None:
        return text, []
    dropped = imports.doubled()
    if not exports:
        dropped |= unused_imports(tree, after, trial, text.split("\n"), leaving)
    fixed: list[ModuleFinding] = []
    result = module.visit(_Rewriter(trial, imports, fixed, dropped)).code
    return (result, fixed) if parse_python(result)[0] is not None else (text, [])


class _Rewriter(cst.CSTTransformer):
    """Replaces the expressions, calls and imports that stand at the wanted places."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(
        self,
        places: Sequence[ModuleFinding],
        imports: ImportEdits,
        fixed: list[ModuleFinding],
        dropped: set[Position] | None = None,
    ) -> None:
        """fixed: gains the places that are rewritten. dropped: places of imported names that
        become unused; None in the trial pass."""
        super().__init__()
        self.imports = imports
        self.fixed = fixed
        self._dropped = dropped
        self._comments: list[cst.EmptyLine] = []
        """Lines above a statement that was removed, for the next one."""
        self._comments_of: dict[cst.CSTNode, list[cst.EmptyLine]] = {}
        self._at: dict[tuple[int, int, int, int], list[ModuleFinding]] = {}
        self._starts: dict[Position, list[ModuleFinding]] = {}
        for place in places:
            span = (place.line, place.column, place.end_line, place.end_column)
            self._at.setdefault(span, []).append(place)
            self._starts.setdefault((place.line, place.column), []).append(place)

    # -- where a node stands ----------------------------------------------------------------------
    def _places(self, node: cst.CSTNode) -> list[ModuleFinding]:
        where = self.get_metadata(PositionProvider, node)
        start, end = where.start, where.end
        return self._at.get((start.line, start.column, end.line, end.column), [])

    def _start(self, node: cst.CSTNode) -> Position:
        start = self.get_metadata(PositionProvider, node).start
        return start.line, start.column

    def _done(self, place: ModuleFinding) -> None:
        if place not in self.fixed:
            self.fixed.append(place)

    # -- expressions ------------------------------------------------------------------------------
    def _expression(
        self, original_node: cst.Name | cst.Attribute, updated_node: cst.Name | cst.Attribute
    ) -> cst.BaseExpression:
        for place in self._places(original_node):
            fix = place.fix
            if fix is None or fix.parameters or fix.arguments == "drop":
                continue
            if fix.special in ("sent", "sync"):
                continue
            new = self._new_expression(place, fix, updated_node)
            if new is not None:
                self._done(place)
                return new
        return updated_node

    leave_Name = leave_Attribute = _expression  # noqa: N815 - libcst's names

    def _new_expression(
        self, place: ModuleFinding, fix: Fix, node: cst.Name | cst.Attribute
    ) -> cst.BaseExpression | None:
        if fix.to and not fix.prepend:
            return self._spelled(fix, place)
        if fix.member:
            return _renamed_last(node, fix.member)
        if fix.module and isinstance(node, cst.Attribute):
            root = place.name.partition(".")[0]
            return expression(fix.module) if fix.module.startswith(root) else None
        return _special(place, fix, node)

    def _spelled(self, fix: Fix, place: ModuleFinding) -> cst.BaseExpression | None:
        name = fix.to.replace("*", place.name.rpartition(".")[2])
        text = self.imports.spell(name, fix.imports, place.line)
        return None if text is None else expression(text)

    # -- calls ------------------------------------------------------------------------------------
    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:  # noqa: N802
        node: cst.BaseExpression = updated_node
        for place in self._places(original_node.func):
            fix = place.fix
            if fix is None or fix.special in ("removed", "sync") or not isinstance(node, cst.Call):
                continue
            new = self._new_call(fix, node, place)
            if new is not None:
                self._done(place)
                node = new
                if fix.to:
                    break  # it is another function's call now
        return node

    def leave_Expr(  # noqa: N802
        self, original_node: cst.Expr, updated_node: cst.Expr
    ) -> cst.Expr | cst.RemovalSentinel:
        """A call that is a statement of its own, and does nothing any more."""
        call = original_node.value
        for place in self._places(call.func) if isinstance(call, cst.Call) else ():
            if place.fix is not None and place.fix.special == "removed":
                self._done(place)
                return cst.RemoveFromParent()
        return updated_node

    def _literal(
        self, original_node: cst.SimpleString | cst.Integer, updated_node: Any
    ) -> cst.BaseExpression:
        for place in self._places(original_node):
            if place.fix is not None and place.fix.special == "text":
                if place.fix.imports:
                    self.imports.spell(place.fix.imports, place.fix.imports, place.line)
                self._done(place)
                return expression(moved_text(updated_node.value, place.fix.to))
        return cast(cst.BaseExpression, updated_node)

    leave_SimpleString = leave_Integer = _literal  # noqa: N815

    def _moved(self, fix: Fix, call: cst.Call, place: ModuleFinding) -> cst.BaseExpression | None:
        if not fix.imports:
            return moved_call(fix, call)
        package = self.imports.spell(fix.imports, fix.imports, place.line)
        if package is None:
            return None
        return moved_call(replace(fix, to=fix.to.replace(f"{fix.imports}.", f"{package}.")), call)

    def _new_call(
        self, fix: Fix, call: cst.Call, place: ModuleFinding
    ) -> cst.BaseExpression | None:
        if fix.special == "mixed-precision":
            return mixed_precision(call)
        if fix.special == "dataloader-configuration":
            return self._loader_configuration(call, place)
        if fix.special in MOVES:
            return self._moved(fix, call, place)
        drops = fix.arguments == "drop"
        if not (drops or fix.parameters or fix.drop or fix.prepend or fix.rename):
            return None
        arguments = [] if drops else new_arguments(fix, call)
        function = self._spelled(fix, place) if fix.to else call.func
        return None if function is None else with_arguments(call, function, arguments)

    def _loader_configuration(self, call: cst.Call, place: ModuleFinding) -> cst.Call | None:
        name = self.imports.spell_member("accelerate", "DataLoaderConfiguration", place.line)
        if name is None:
            return None
        moved = [a for a in call.args if a.keyword and a.keyword.value in _LOADER_KEYWORDS]
        inner = ", ".join(code_of(a.with_changes(comma=cst.MaybeSentinel.DEFAULT)) for a in moved)
        kept = [a for a in call.args if a not in moved]
        configured = keyword_argument("dataloader_config", f"{name}({inner})")
        return with_arguments(call, call.func, [*kept, configured])

    # -- imports ----------------------------------------------------------------------------------
    def leave_Import(  # noqa: N802
        self, original_node: cst.Import, updated_node: cst.Import
    ) -> cst.Import | cst.RemovalSentinel:
        aliases: list[cst.ImportAlias] = []
        for before, alias in zip(original_node.names, updated_node.names, strict=True):
            if self._start(before) in (self._dropped or ()):
                continue
            place = next(iter(self._starts.get(self._start(before), [])), None)
            if place is not None and place.fix is not None and place.fix.module:
                aliases.append(alias.with_changes(name=self._new_module(place, alias.name)))
            else:
                aliases.append(alias)
        if not aliases:
            return cst.RemoveFromParent()
        aliases[-1] = aliases[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
        return updated_node.with_changes(names=aliases)

    def _new_module(self, place: ModuleFinding, old: cst.CSTNode) -> cst.BaseExpression:
        self._done(place)
        assert place.fix is not None
        return expression(place.fix.module + code_of(old)[len(place.name) :])

    def leave_ImportFrom(  # noqa: N802
        self, original_node: cst.ImportFrom, updated_node: cst.ImportFrom
    ) -> cst.ImportFrom | cst.RemovalSentinel | cst.FlattenSentinel[cst.BaseSmallStatement]:
        for place in self._starts.get(self._start(original_node), []):
            if place.fix is not None and place.fix.module and updated_node.module is not None:
                new = self._new_module(place, updated_node.module)
                return updated_node.with_changes(module=new)
        if isinstance(original_node.names, cst.ImportStar):
            return updated_node
        return self._imported_names(original_node, updated_node)

    def _imported_names(
        self, original: cst.ImportFrom, updated: cst.ImportFrom
    ) -> cst.ImportFrom | cst.RemovalSentinel | cst.FlattenSentinel[cst.BaseSmallStatement]:
        assert not isinstance(original.names, cst.ImportStar)
        assert not isinstance(updated.names, cst.ImportStar)
        kept: list[cst.ImportAlias] = []
        moved: list[cst.BaseSmallStatement] = []
        for before, alias in zip(original.names, updated.names, strict=True):
            position = self._start(before)
            fixes = [p for p in self._starts.get(position, []) if p.fix is not None]
            place = fixes[0] if fixes else None
            if position in (self._dropped or ()):
                if place is not None:
                    self._done(place)
            elif place is not None and place.fix and place.fix.member:
                kept.append(alias.with_changes(name=cst.Name(place.fix.member)))
                self._done(place)
            elif place is not None and place.fix and place.fix.module:
                moved.append(_from_import(place.fix.module, alias))
                self._done(place)
            else:
                # Only the trial knows whether all its uses are rewritten.
                if place is not None and place.fix and place.fix.to and self._dropped is None:
                    self._done(place)
                kept.append(alias)
        return _rebuilt(updated, kept, moved)

    # -- statements -------------------------------------------------------------------------------
    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.BaseCompoundStatement):
            self._comments_of[node], self._comments = self._comments, []
        return super().on_visit(node)

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        left: Any = super().on_leave(original_node, updated_node)
        above = self._comments_of.pop(original_node, None)
        return left.with_changes(leading_lines=[*above, *left.leading_lines]) if above else left

    def leave_SimpleStatementLine(  # noqa: N802
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.RemovalSentinel | cst.FlattenSentinel[cst.BaseStatement]:
        first = self._start(original_node)[0]
        last = self.get_metadata(PositionProvider, original_node).end.line
        above = [*self._comments, *updated_node.leading_lines]
        kept = [updated_node] if updated_node.body else []
        kept += self._syncs(original_node)
        if self._dropped is not None:
            lines = range(first, last + 1)
            new = (i.statement for i in self.imports.insertions if i.after_line in lines)
            kept += _statements(new)
        self._comments = [] if kept else above
        if not kept:
            return cst.RemoveFromParent()
        return cst.FlattenSentinel([kept[0].with_changes(leading_lines=above), *kept[1:]])

    def _syncs(self, line: cst.SimpleStatementLine) -> list[cst.SimpleStatementLine]:
        """The statement that ends a step, for below the one that makes it."""
        call = getattr(line.body[0], "value", None)
        for place in self._places(call.func) if isinstance(call, cst.Call) else ():
            if place.fix is not None and place.fix.special == "sync":
                name = self.imports.spell(place.fix.to, place.fix.imports, place.line)
                if name is not None:
                    self._done(place)
                    return _statements([f"{name}()"])
        return []

    def leave_Module(self, original_node: cst.Module, updated_node: cst.Module) -> cst.Module:  # noqa: N802
        """New imports stand below the docstring and `__future__`."""
        new = _statements(self.imports.at_head()) if self._dropped is not None else []
        body = list(updated_node.body)
        at = next((n for n, statement in enumerate(body) if not _is_head(statement)), len(body))
        if new and at < len(body):
            new[0] = new[0].with_changes(leading_lines=body[at].leading_lines)
            body[at] = body[at].with_changes(leading_lines=())
        footer = [*self._comments, *updated_node.footer]
        return updated_node.with_changes(body=[*body[:at], *new, *body[at:]], footer=footer)


def _statements(texts: Iterable[str]) -> list[cst.SimpleStatementLine]:
    return [cast(cst.SimpleStatementLine, cst.parse_statement(text)) for text in texts]


def _is_head(statement: cst.CSTNode) -> bool:
    """Whether a statement is a text or imports from `__future__`."""
    if not isinstance(statement, cst.SimpleStatementLine):
        return False
    match statement.body[0]:
        case cst.Expr(value=cst.SimpleString() | cst.ConcatenatedString()):
            return True
        case cst.ImportFrom(module=cst.Name("__future__")):
            return True
    return False


def _special(
    place: ModuleFinding, fix: Fix, node: cst.Name | cst.Attribute
) -> cst.BaseExpression | None:
    kind, _, last = fix.special.partition(":")
    if kind == "last":
        return _renamed_last(node, last)
    if kind == "python-type":
        name = place.name.rpartition(".")[2]
        return cst.Name(_PYTHON_TYPES.get(name, name))
    if not isinstance(node, cst.Attribute):
        return None
    if kind == "use-fp16":
        return expression(f'({code_of(node.value)}.mixed_precision == "fp16")')
    if kind == "device-type":
        return expression(f"{code_of(node.value)}.device.type")
    return node.value if kind == "held" else None


def _renamed_last(node: cst.Name | cst.Attribute, last: str) -> cst.BaseExpression:
    if isinstance(node, cst.Attribute):
        return node.with_changes(attr=cst.Name(last))
    return node.with_changes(value=last)


def _from_import(module: str, alias: cst.ImportAlias) -> cst.ImportFrom:
    """`from timm.models import layers` becomes `from timm import layers`."""
    parent, _, last = module.rpartition(".")
    old = alias.evaluated_alias or alias.evaluated_name
    renamed = f" as {old}" if old != last else ""
    line = cst.parse_statement(f"from {parent} import {last}{renamed}")
    assert isinstance(line, cst.SimpleStatementLine) and isinstance(line.body[0], cst.ImportFrom)
    return line.body[0]


def _rebuilt(
    node: cst.ImportFrom, kept: list[cst.ImportAlias], moved: list[cst.BaseSmallStatement]
) -> cst.ImportFrom | cst.RemovalSentinel | cst.FlattenSentinel[cst.BaseSmallStatement]:
    assert not isinstance(node.names, cst.ImportStar)
    if not kept and not moved:
        return cst.RemoveFromParent()
    if not kept:
        return cst.FlattenSentinel(moved) if len(moved) > 1 else moved[0]  # type: ignore[return-value]
    if len(kept) < len(node.names):
        trailing = node.names[-1].comma if node.lpar else cst.MaybeSentinel.DEFAULT
        kept[-1] = kept[-1].with_changes(comma=trailing)
    new = node.with_changes(names=kept)
    return cst.FlattenSentinel([*moved, new]) if moved else new
