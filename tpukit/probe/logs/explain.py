"""Explains a whole log: reads it in pieces and matches them against the known errors."""

import codecs
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from tpukit.knowledge.error_table import KnownError, known_errors
from tpukit.knowledge.releases import releases_in
from tpukit.probe.logs.explanations import Explanation
from tpukit.probe.logs.log_source import LogSource, encoding_of
from tpukit.probe.logs.log_text import Line, clean_lines, drop_updates
from tpukit.probe.logs.matching import Matcher
from tpukit.probe.logs.place import FAMILIES, at_the_place
from tpukit.probe.logs.place.live import Uncaught, record_of, text_of
from tpukit.probe.logs.quoting import LINES
from tpukit.probe.logs.raised_causes import explain_logged, explain_raised
from tpukit.probe.logs.ranking import StepsSeen, ranked
from tpukit.probe.logs.tracebacks import TracebackReader
from tpukit.probe.logs.whole_log import WholeLog

_WHOLE_BYTES = 4 << 20
"""Bytes of a log that are searched line by line; after them only lines that differ by more than
numbers are."""
_MOST_SHAPES = 400_000
_LONGEST_LINE = 20_000
_LONGEST_TRACEBACK = 100_000
_MOST_PLACES = 2
"""Causes whose source files are read."""
_DIGITS = {ord(c): None for c in "0123456789.,:-+ "}
_ESCAPED = "\\n"
"""A newline as experiment trackers write it into one line."""
_JSON_TEXTS = ("data", "event", "log", "message", "msg", "text", "textPayload", "MESSAGE")
_JSON_ERRORS = ("error", "exception", "detail", "reason")


@dataclass(frozen=True)
class ExplainedLog:
    """The explanations of a log."""

    explanations: list[Explanation]
    unknown: list[Line]
    """The first few lines that look like errors and match no known error."""
    lines: int
    notes: list[str]

    @property
    def has_error(self) -> bool:
        """Whether something failed, known or not."""
        failed = any(e.role in ("cause", "consequence") for e in self.explanations)
        reports = LINES["failure"].match
        # A line that no entry knows can report an error, or only speak of one.
        return failed or any(
            line.level in ("E", "F") or reports(line.text) for line in self.unknown
        )


class LogExplainer:
    """Explains lines that are fed piece by piece: by the table's texts, then by tracebacks."""

    def __init__(self, entries: Sequence[KnownError]) -> None:
        self._matcher, self.tracebacks = Matcher(entries), TracebackReader()
        self._progress, self._whole = StepsSeen(), WholeLog()
        self._releases: dict[str, str] = {}

    def feed(self, lines: Sequence[Line]) -> None:
        self._matcher.feed(lines)
        self.tracebacks.feed(lines)
        self._progress.feed(lines)
        self._whole.feed(lines)
        for line in lines:
            self._releases.update(releases_in(line.text))

    def explanations(self, records: Sequence[Uncaught] = ()) -> list[Explanation]:
        """The explanations: causes first, then consequences, warnings and harmless messages.

        The first ones are read at their place, with the values of `records`.
        """
        return [
            at_the_place(e, records) if index < _MOST_PLACES and e.role == "cause" else e
            for index, e in enumerate(self._ranked())
        ]

    def known_lines(self) -> set[int]:
        """Lines of texts of the table, and of exceptions that Python printed and ignored."""
        return {*self._matcher.matches().lines} | self.tracebacks.ignored

    def _ranked(self) -> list[Explanation]:
        matches = self._matcher.matches()
        chains = self.tracebacks.last_of_chains()
        found = explain_raised(chains, self._matcher.entries, matches, self._releases)
        if not any(e.role == "cause" and not e.mild for e in found):
            lines = (*self.tracebacks.logged, *self.tracebacks.latest)
            logged = [raised for raised in lines if raised.line.number not in matches.lines]
            found += explain_logged(logged, self._matcher.entries, self._releases)
        # What the line itself names comes before what the whole log does.
        found = [replace(e, captures={**self._whole.captures(e), **e.captures}) for e in found]
        return ranked(found, self._progress)


def explain_log(
    source: LogSource, entries: Sequence[KnownError], records: Sequence[Uncaught] = ()
) -> ExplainedLog:
    """Reads the log to its end (or its time limit) and explains every known error in it.

    `records` are those of the exceptions that the program did not catch.
    """
    explainer, suspects = LogExplainer(entries), _Suspects()
    count = 0
    try:
        for lines, last in _batches(source):
            count, cleaned = last, list(clean_lines(lines))
            explainer.feed(cleaned)
            suspects.look(cleaned)
    finally:
        source.close()
    explanations = explainer.explanations(records)
    known = explainer.known_lines().union(*(range(e.line, e.last + 1) for e in explanations))
    unknown = [line for line in suspects.lines if line.number not in known]
    if not explanations and not unknown:
        unknown = [line for line in suspects.loud if line.number not in known]
    return ExplainedLog(explanations, unknown, count, source.notes)


def explain_exception(error: BaseException) -> Explanation | None:
    """The explanation of an exception of this process, with the values around it; None where the
    tables and its place say nothing. Never raises."""
    try:
        explainer = LogExplainer(known_errors())
        text = text_of(error)[-_LONGEST_TRACEBACK:]
        explainer.feed(list(clean_lines(enumerate(text.split("\n"), start=1))))
        first = next(iter(explainer.explanations([record_of(error)])), None)
    except Exception:
        # The caller reports an error already, which must not be lost (out of memory, say).
        return None
    if first is None or first.role == "harmless":
        return None
    return None if first.id.startswith(FAMILIES) and not first.leads else replace(first, shown="")


@dataclass
class _Suspects:
    """Collects the first lines that look like errors, reported if none is known."""

    lines: list[Line] = field(default_factory=list)
    loud: list[Line] = field(default_factory=list)
    """The first lines of the level of an error that do not look like one."""
    most: int = 5

    def look(self, lines: Sequence[Line]) -> None:
        loud = (line for line in lines if line.level != "I")
        hits = (line for line in loud if LINES["error_line"].search(line.text[:500]))
        self.lines += islice(hits, self.most - len(self.lines))
        errors = (line for line in lines if line.level in ("E", "F") and line.text)
        self.loud += islice(errors, self.most - len(self.loud))


def _batches(source: LogSource) -> Iterator[tuple[list[tuple[int, str]], int]]:
    """Numbered lines of each piece, unpacked from JSON where needed, and the number of the piece's
    last line."""
    shapes: set[str] | None = None
    for number, text, offset in _lines_of_pieces(source):
        if offset > _WHOLE_BYTES and shapes is None:
            shapes = set()
        numbered = list(enumerate(text.split("\n"), start=number))
        last = numbered[-1][0]
        if shapes is not None and len(shapes) < _MOST_SHAPES:
            numbered = _unlike_before(numbered, text, shapes)
        yield unpack(numbered), last


def _unlike_before(
    numbered: list[tuple[int, str]], text: str, shapes: set[str]
) -> list[tuple[int, str]]:
    """Lines that differ by more than numbers from every line seen so far."""
    fresh = []
    for (number, line), shape in zip(numbered, text.translate(_DIGITS).split("\n"), strict=True):
        if shape not in shapes:
            shapes.add(shape)
            fresh.append((number, line))
    return fresh


def _lines_of_pieces(source: LogSource) -> Iterator[tuple[int, str, int]]:
    """(number of the first line, whole lines, offset) of each piece."""
    decoder: codecs.IncrementalDecoder | None = None
    number, rest, expected = 1, "", 0
    for piece, offset in source.pieces():
        if decoder is None:
            encoding = encoding_of(piece, source.name)
            decoder = codecs.getincrementaldecoder(encoding)(errors="replace")
        if offset != expected:
            number, rest = number + 1, ""
            decoder.reset()
        expected = offset + len(piece)
        text = rest + decoder.decode(piece)
        text, newline, rest = text.rpartition("\n")
        if newline:
            yield number, text, offset
            number += text.count("\n") + 1
        elif len(rest) > _LONGEST_LINE:
            yield number, rest, offset
            rest = ""
    if rest:
        yield number, rest, expected


def unpack(numbered: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """Lines stored in JSON (a notebook's outputs, Kaggle's and docker's logs) as printed."""
    return [
        (number, _fit(part)) for number, line in numbered for part in _unpack_line(line).split("\n")
    ]


def _fit(line: str) -> str:
    """A very long line without a progress bar's updates, or else its beginning and its end."""
    if len(line) > _LONGEST_LINE and "\r" in line:
        line = "\r".join(drop_updates(line))
    if len(line) <= _LONGEST_LINE:
        return line
    return f"{line[: _LONGEST_LINE // 2]} ... {line[-_LONGEST_LINE // 2 :]}"


def _unpack_line(line: str) -> str:
    stripped = line.strip().strip(",").lstrip("[,") if len(line) < 200_000 else ""
    if stripped[:1] == '"' and stripped[-1:] == '"':
        value = _load(stripped)
        return value.rstrip("\n") if isinstance(value, str) else line
    if stripped[:1] == "{":
        value = _load(stripped.rstrip("]"))
        texts = [value.get(key) for key in _JSON_TEXTS] if isinstance(value, dict) else []
        said = [text.rstrip("\n") for text in texts if isinstance(text, str)][:1]
        failed = [value.get(key) for key in _JSON_ERRORS] if isinstance(value, dict) else []
        said += [f"error: {text}" for text in failed if text and isinstance(text, str)]
        return "\n".join(said) or line
    if _ESCAPED in line and "Traceback (most recent call" in line:
        return line.replace(_ESCAPED, "\n").replace('\\"', '"').replace("\\'", "'")
    return line


def _load(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
