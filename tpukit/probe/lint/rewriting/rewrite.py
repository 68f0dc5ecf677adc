"""Rewrites places that have one replacement by edits of the text: all else stays as it is."""

import ast
import re
from collections.abc import Collection, Iterator, Sequence
from itertools import islice

from tpukit.knowledge.calls import Fix
from tpukit.probe.lint.finding import Finding
from tpukit.probe.lint.names import Names
from tpukit.probe.lint.rewriting.calls import (
    Arguments,
    filled,
    is_about_arguments,
    moved_text,
)
from tpukit.probe.lint.rewriting.imports import ImportEdits
from tpukit.probe.lint.rewriting.text import Edit, SourceText, without
from tpukit.probe.lint.source import parse_python
from tpukit.probe.lint.syntax import LINE_END, NAMED, of_kind

_LITERAL = re.compile(r"[rbu]*(['\"])(?s:.*)\1|\d+", re.I)
_PYTHON_TYPES = {"unicode": "str"}
_BLOCKS = ("body", "orelse", "finalbody")
"""Fields that hold a list of statements."""
_IMPORTS = (ast.Import, ast.ImportFrom)


def rewrite(
    text: str,
    tree: ast.Module,
    places: Sequence[Finding],
    *,
    exports: bool = False,
    leaving: str = "",
) -> tuple[str, list[Finding]]:
    """The module's text with every place that has a fix rewritten where possible, and those.

    exports: other modules import names from this one, so unused imports stay.
    leaving: a package whose imports go with their last use, also plain ones.
    """
    source = SourceText(text)
    end = "" if text.endswith("\n") else source.newline
    rewriter = _Rewriter(SourceText(f"{text}{end}"), tree)
    fixed = [place for place in places if place.fix is not None and rewriter.makes(place)]
    after, _ = parse_python(rewriter.text())
    if not fixed or after is None:
        return text, []
    dropped = rewriter.imports.doubled()
    if not exports:
        dropped |= rewriter.imports.unused(after, fixed, LINE_END.split(text), leaving)
    # An import of an old name is rewritten only where all its uses are.
    fixed = [place for place in fixed if place.node not in rewriter.old_names - dropped]
    result = rewriter.text(dropped, is_last=True).removesuffix(end)
    return (result, fixed) if parse_python(result)[0] is not None else (text, [])


class _Rewriter:
    """The edits of one module: those of expressions are made place by place, those of statements
    and imports together."""

    def __init__(self, source: SourceText, tree: ast.Module) -> None:
        self.source = source
        names = Names(tree)
        self.imports = ImportEdits(names)
        self.old_names: set[ast.AST] = set()
        """Imported names of which only the uses are rewritten."""
        self._tree = tree
        self._parents = names.parents
        self._imports = of_kind(names.parents, *_IMPORTS)
        self._edits: list[Edit] = []
        self._arguments: dict[ast.Call, Arguments] = {}
        self._renamed: set[ast.expr] = set()
        """Functions in whose place another one is called."""
        self._removed: set[ast.stmt] = set()
        self._below: list[tuple[ast.stmt, str]] = []
        """Statements to write below others."""
        self._moved: dict[ast.alias, str] = {}
        """Imported modules that stand elsewhere, and the statement that imports them."""

    def makes(self, place: Finding) -> bool:
        """Notes the edits of a place; whether there are any."""
        node, fix = place.node, place.fix
        assert fix is not None
        if isinstance(node, ast.alias | ast.ImportFrom):
            return self._imported(node, fix, place)
        if isinstance(node, ast.Constant):
            return self._literal(node, fix, place.line)
        return isinstance(node, NAMED) and self._used(node, fix, place)

    def _used(self, node: ast.Name | ast.Attribute, fix: Fix, place: Finding) -> bool:
        call = self.imports.names.call_of(node)
        if fix.special in ("removed", "sync"):
            return call is not None and self._statement(call, fix, place.line)
        if fix.call or fix.use:
            at = call if fix.call else node
            return at is not None and self._in_place(at, fix, place.line)
        if is_about_arguments(fix):
            return call is not None and self._called(node, call, fix, place)
        new = self._expression(place, fix, node)
        self._edits += [Edit(*self.source.span(node), new)] if new is not None else []
        return new is not None

    def text(self, dropped: Collection[ast.alias] = (), *, is_last: bool = False) -> str:
        """The module's text with the edits, without the imported names that go.

        is_last: with new imports, which nobody needs to see what is used."""
        # An argument that goes is not changed before.
        edits = [edit for call in self._arguments.values() for edit in call.edits()]
        edits += self._edits
        removed = set(self._removed)
        for statement in self._imports:
            edits += self._import_edits(statement, dropped, removed)
        below = list(self._below)
        if is_last:
            for line, new in self.imports.insertions:
                beside = (s for s in self._imports if s.lineno == line)
                below += [(s, new) for s in islice(beside, 1)]
            edits += self._head_edits(self.imports.at_head())
        return self.source.edited([*edits, *self._statement_edits(removed, below)])

    # -- expressions ------------------------------------------------------------------------------
    def _expression(self, place: Finding, fix: Fix, node: ast.Name | ast.Attribute) -> str | None:
        name = place.name.rpartition(".")[2]
        if fix.to:
            return self.imports.spell(fix.to.replace("*", name), fix.imports, place.line)
        if fix.special == "python-type":
            return _PYTHON_TYPES.get(name, name)
        if fix.module and isinstance(node, ast.Attribute):
            return fix.module if fix.module.startswith(place.name.partition(".")[0]) else None
        # With the white space around the dot.
        last = getattr(node, "attr", "")
        held = self.source.of(node).removesuffix(last) if last else ""
        return f"{held}{fix.member}" if fix.member else None

    def _literal(self, node: ast.Constant, fix: Fix, line: int) -> bool:
        text = self.source.of(node)
        if fix.special != "text" or not _LITERAL.fullmatch(text):
            return False
        if fix.imports:
            self.imports.spell(fix.imports, fix.imports, line)
        self._edits.append(Edit(*self.source.span(node), moved_text(text, fix.to)))
        return True

    # -- calls ------------------------------------------------------------------------------------
    def _called(
        self, function: ast.Name | ast.Attribute, call: ast.Call, fix: Fix, place: Finding
    ) -> bool:
        new: str | None = ""
        if fix.special == "dataloader-configuration":
            member = "DataLoaderConfiguration"
            new = self.imports.spell_member("accelerate", member, place.line)
        elif fix.to:
            new = self._expression(place, fix, function)
        if new is None or function in self._renamed:
            return False
        if fix.to:
            self._renamed.add(function)
            self._edits.append(Edit(*self.source.span(function), new))
        self._arguments.setdefault(call, Arguments(self.source, call)).take(fix, new)
        return True

    def _in_place(self, node: ast.expr, fix: Fix, line: int) -> bool:
        template = fix.call or fix.use
        if fix.imports:
            package = self.imports.spell(fix.imports, fix.imports, line)
            if package is None:
                return False
            template = template.replace(f"{fix.imports}.", f"{package}.")
        edits = filled(self.source, node, fix, template)
        self._edits += edits
        return bool(edits)

    # -- statements -------------------------------------------------------------------------------
    def _statement(self, call: ast.Call, fix: Fix, line: int) -> bool:
        """Removes a call that is a statement of its own, or ends the step below it."""
        statement = self._parents[call]
        if not isinstance(statement, ast.stmt):
            return False
        if fix.special == "removed":
            self._removed |= {statement} if isinstance(statement, ast.Expr) else set()
            return isinstance(statement, ast.Expr)
        name = self.imports.spell(fix.to, fix.imports, line)
        self._below += [(statement, f"{name}()")] if name is not None else []
        return name is not None

    def _statement_edits(
        self, removed: set[ast.stmt], below: Sequence[tuple[ast.stmt, str]]
    ) -> Iterator[Edit]:
        """Removes statements, and writes some below others, by the lines on which they stand."""
        concerned = {*removed, *(statement for statement, _ in below)}
        for parent in dict.fromkeys(self._parents[s] for s in concerned):
            blocks = (getattr(parent, name, None) for name in _BLOCKS)
            for block in (b for b in blocks if isinstance(b, list) and not concerned.isdisjoint(b)):
                stays = isinstance(parent, ast.Module) or any(
                    s not in removed or any(s is beside for beside, _ in below) for s in block
                )
                for line in _lines(block):
                    new = [text for s, text in below if s in line]
                    new += [] if stays or line[0] is not block[0] else ["pass"]
                    yield from self._line_edits(line, removed, list(dict.fromkeys(new)))

    def _line_edits(
        self, line: Sequence[ast.stmt], removed: set[ast.stmt], new: Sequence[str]
    ) -> Iterator[Edit]:
        """new: statements to write below those of a line, or in their place."""
        spans = list(map(self.source.span, line))
        kept = {number for number, s in enumerate(line) if s not in removed}
        start, end = self.source.lines_around(line[0], line[-1])
        indent = self.source.text[start : spans[0][0]]
        if indent.strip():  # behind the colon of `if x:`
            yield from without(spans, kept) if kept else ()
            text = "; ".join([*([""] if kept else []), *new])
            yield Edit(spans[-1][1] if kept else spans[0][0], spans[-1][1], text)
            return
        yield from without(spans, kept) if kept else [Edit(start, end, "")]
        for text in new:
            yield Edit(end, end, f"{indent}{text}{self.source.newline}")

    def _head_edits(self, statements: Sequence[str]) -> Iterator[Edit]:
        """New imports stand below the docstring and `__future__`."""
        first = next((s for s in self._tree.body if not _is_head(s)), None)
        at = len(self.source.text)
        if first is not None:
            lines = [first.lineno, *(d.lineno for d in getattr(first, "decorator_list", ()))]
            at = self.source.starts[min(lines) - 1]
        for text in statements:
            yield Edit(at, at, f"{text}{self.source.newline}")

    # -- imports ----------------------------------------------------------------------------------
    def _imported(self, node: ast.alias | ast.ImportFrom, fix: Fix, place: Finding) -> bool:
        start, _ = self.source.span(node)
        if isinstance(node, ast.ImportFrom):
            named = re.compile(r"from\s+").match(self.source.text, start)
            if not fix.module or named is None:
                return False
            self._edits.append(Edit(named.end(), named.end() + len(place.name), fix.module))
        elif isinstance(self._parents[node], ast.Import):
            if not fix.module:
                return False
            self._edits.append(Edit(start, start + len(place.name), fix.module))
        elif fix.member:
            self._edits.append(Edit(start, start + len(node.name), fix.member))
        elif fix.module:
            parent, _, last = fix.module.rpartition(".")
            local = node.asname or node.name
            renamed = f" as {local}" if local != last else ""
            self._moved[node] = f"from {parent} import {last}{renamed}"
        elif fix.to:
            self.old_names.add(node)
        return bool(fix.module or fix.member or fix.to)

    def _import_edits(
        self,
        node: ast.Import | ast.ImportFrom,
        dropped: Collection[ast.alias],
        removed: set[ast.stmt],
    ) -> Iterator[Edit]:
        """Takes names from an import; `removed` gains one that has no name left."""
        gone = [alias in dropped or alias in self._moved for alias in node.names]
        moved = [self._moved[a] for a in node.names if a in self._moved and a not in dropped]
        start, end = self.source.span(node)
        if not any(gone):
            return
        if all(gone) and not moved:
            removed.add(node)
        elif all(gone):
            yield Edit(start, end, "; ".join(moved))
        else:
            yield Edit(start, start, "".join(f"{text}; " for text in moved))
            kept = {number for number, is_gone in enumerate(gone) if not is_gone}
            yield from without(list(map(self.source.span, node.names)), kept)


def _lines(block: Sequence[ast.stmt]) -> list[list[ast.stmt]]:
    """Statements of a block by the lines on which they stand: those of `a; b` together."""
    found: list[list[ast.stmt]] = []
    for statement in block:
        if found and statement.lineno == found[-1][-1].end_lineno:
            found[-1].append(statement)
        else:
            found.append([statement])
    return found


def _is_head(statement: ast.stmt) -> bool:
    """Whether a statement is a text or imports from `__future__`."""
    if isinstance(statement, ast.ImportFrom):
        return statement.module == "__future__"
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)
