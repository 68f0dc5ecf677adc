"""Edits of a module's text: spans that get another text; an outer span takes the inner ones'
place."""

import ast
import io
import tokenize
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from tpukit.probe.lint.syntax import LINE_END, characters

Span = tuple[int, int]
_SPACE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}


@dataclass(frozen=True)
class Edit:
    """A new text for a span; for an empty one an insertion."""

    start: int
    end: int
    new: str


class SourceText:
    """A module's text, and where the nodes of its syntax tree stand in it, in characters."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.newline = "\r\n" if "\r\n" in text else "\n"
        self.starts = [0, *(end.end() for end in LINE_END.finditer(text))]

    def span(self, node: ast.expr | ast.stmt | ast.alias | ast.keyword) -> Span:
        end_line, end_column = node.end_lineno or node.lineno, node.end_col_offset or 0
        return self._at(node.lineno, node.col_offset), self._at(end_line, end_column)

    def of(self, node: ast.expr | ast.alias) -> str:
        start, end = self.span(node)
        return self.text[start:end]

    def _at(self, line: int, byte: int) -> int:
        start, end = self._line_span(line, line)
        return start + characters(self.text[start:end], byte)

    def lines_around(self, first: ast.stmt, last: ast.stmt) -> Span:
        """Where the first line of some statements begins, and the line behind them."""
        return self._line_span(first.lineno, last.end_lineno or last.lineno)

    def _line_span(self, first: int, last: int) -> Span:
        return self.starts[first - 1], [*self.starts[last : last + 1], len(self.text)][0]

    def arguments(self, call: ast.Call) -> tuple[int, list[Span]]:
        """Where the first argument of a call may stand, and the spans of all, with brackets."""
        start, end = self.span(call)
        inside = SourceText(self.text[start:end])
        function = self.span(call.func)[1] - start
        depth, opened, spans, is_new = 0, end, [], True
        for token in tokenize.generate_tokens(io.StringIO(inside.text, newline="").readline):
            at, stop = (inside.starts[line - 1] + column for line, column in token[2:4])
            if at < function or token.type in _SPACE or not (depth or token.string == "("):
                continue
            if token.type == tokenize.OP:
                depth += (token.string in "([{") - (token.string in ")]}")
            if not depth:
                break
            if depth == 1 and opened == end:
                opened = start + stop
            elif depth == 1 and token.string == ",":
                is_new = True
            elif is_new:
                spans.append((start + at, start + stop))
                is_new = False
            else:
                spans[-1] = (spans[-1][0], start + stop)
        return opened, spans

    def edited(self, edits: Iterable[Edit]) -> str:
        parts, at = [], 0
        for edit in sorted(edits, key=lambda e: (e.start, e.end > e.start, -e.end)):
            if edit.start >= at:
                parts += [self.text[at : edit.start], edit.new]
                at = edit.end
        return "".join([*parts, self.text[at:]])


def without(spans: Sequence[Span], kept: Collection[int]) -> Iterator[Edit]:
    """Deletes members of a list, with what separates them from the next; one at least is kept."""
    for number, (start, end) in enumerate(spans):
        if number not in kept and number < max(kept):
            yield Edit(start, spans[number + 1][0], "")
        elif number not in kept:
            yield Edit(spans[number - 1][1], end, "")
