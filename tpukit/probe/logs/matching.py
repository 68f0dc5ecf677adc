"""Finds known errors in text: in a log's lines, piece by piece, or in an exception."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from tpukit.knowledge.error_table import ROLES, KnownError, known_errors
from tpukit.probe.logs.log_text import Line, clean_lines
from tpukit.probe.logs.memory_advice import advise
from tpukit.probe.logs.patterns import FlowPattern, flow_pattern, squeeze

_NEARBY_LINES = 60
_NEARBY_CHARACTERS = 3000
_MOST_COUNTED = 20_000
_MOST_CHAINED = 8
_LONGEST_MESSAGE = 20_000
_LONGEST_LINE = 4000


@dataclass
class Explanation:
    """A known error that was found."""

    entry: KnownError
    line: int
    """The first line it was found on, from 1."""
    text: str
    """That line, cleaned."""
    captures: dict[str, str]
    count: int = 1

    @property
    def id(self) -> str:
        return self.entry.id

    @property
    def cause(self) -> str:
        cause = self.entry.cause
        return f"Probably: {cause}" if self.entry.inferred else cause

    @property
    def fix(self) -> str:
        advice = advise(self.captures)
        return f"{advice} {self.entry.fix}" if advice else self.entry.fix

    def as_json(self) -> dict[str, Any]:
        """The fields of `doctor --json`."""
        return {
            "id": self.id,
            "line": self.line,
            "cause": self.cause,
            "fix": self.fix,
            "source": self.entry.source,
            "text": self.text,
            "role": self.entry.role,
            "count": self.count,
        }


@dataclass
class Matcher:
    """Finds known errors in lines that are fed piece by piece."""

    entries: Sequence[KnownError]
    found: dict[str, Explanation] = field(default_factory=dict)
    _kept: list[Line] = field(default_factory=list)
    _counted: dict[str, set[int]] = field(default_factory=dict)

    def feed(self, lines: Iterable[Line]) -> None:
        """Searches further lines, together with the last ones of the previous piece."""
        fresh = list(lines)
        seen_until = self._kept[-1].number if self._kept else 0
        everything = [*self._kept, *fresh]
        self._kept = everything[-_NEARBY_LINES:]
        for stream in _streams(everything):
            self._search_flows(stream, seen_until)
        self._search_lines(fresh)

    def explanations(self) -> list[Explanation]:
        """The explanations: causes first, then consequences, warnings and harmless messages."""
        kept = [e for e in self.found.values() if not self._replaced(e)]
        return sorted(kept, key=lambda e: (ROLES.index(e.entry.role), e.line))

    def _search_flows(self, lines: Sequence[Line], seen_until: int) -> None:
        pieces = [squeeze(line.text) for line in lines]
        squeezed, ends = "".join(pieces), list(accumulate(map(len, pieces)))
        for entry in self.entries:
            for text in entry.match:
                self._count(entry, flow_pattern(text), squeezed, ends, lines, seen_until)

    def _count(
        self,
        entry: KnownError,
        pattern: FlowPattern,
        squeezed: str,
        ends: list[int],
        lines: Sequence[Line],
        seen_until: int,
    ) -> None:
        """Notes every match of one pattern that ends in lines not yet counted."""
        match = pattern.search(squeezed)
        while match is not None:
            around = squeezed[
                max(0, match.start() - _NEARBY_CHARACTERS) : match.end() + _NEARBY_CHARACTERS
            ]
            last = lines[bisect_right(ends, max(match.end() - 1, 0))]
            needs = [squeeze(word) for word in entry.needs]
            if last.number > seen_until and _has_one(around, needs):
                first = lines[bisect_right(ends, match.start())]
                self._note(entry, first, last.number, match)
            match = pattern.search(squeezed, max(match.end(), match.start() + 1))

    def _search_lines(self, lines: Sequence[Line]) -> None:
        everything = "\n".join(line.text for line in lines)
        for entry in self.entries:
            if not entry.regex or not _has_one(everything, entry.hints):
                continue
            for line in lines:
                if _has_one(line.text, entry.hints):
                    self._match_line(entry, line)

    def _match_line(self, entry: KnownError, line: Line) -> None:
        for regex in entry.regex:
            match = regex.search(line.text[:_LONGEST_LINE])
            if match is not None:
                self._note(entry, line, line.number, match)
                return

    def _note(self, entry: KnownError, line: Line, last: int, match: re.Match[str]) -> None:
        known = self.found.get(entry.id)
        counted = self._counted.setdefault(entry.id, set())
        is_new = line.number not in counted and last not in counted
        if len(counted) < _MOST_COUNTED:
            counted.update((line.number, last))
        captures = {name: value for name, value in match.groupdict().items() if value}
        if known is None:
            self.found[entry.id] = Explanation(entry, line.number, line.text[:300], captures)
            return
        known.captures = {**captures, **known.captures}
        if line.number < known.line:
            known.line, known.text = line.number, line.text[:300]
        known.count += is_new

    def _replaced(self, explanation: Explanation) -> bool:
        others = (self.found.get(other) for other in explanation.entry.below)
        return any(
            o is not None and abs(o.line - explanation.line) <= _NEARBY_LINES for o in others
        )


def _streams(lines: Sequence[Line]) -> list[list[Line]]:
    """All lines, and where several ranks wrote, those of each: another rank's lines interrupt a
    wrapped text."""
    by_rank: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        by_rank[line.stream].append(line)
    return [list(lines), *by_rank.values()] if len(by_rank) > 1 else [list(lines)]


def _has_one(text: str, words: Sequence[str]) -> bool:
    return not words or any(word in text for word in words)


def explain_text(text: str, entries: Sequence[KnownError] | None = None) -> Explanation | None:
    """The first known cause in a short text (an exception's, say), or None."""
    matcher = Matcher(known_errors() if entries is None else entries)
    matcher.feed(clean_lines(enumerate(text.split("\n"), start=1)))
    explained = matcher.explanations()
    return explained[0] if explained else None


def explain_exception(error: BaseException) -> Explanation | None:
    """The explanation of an exception, or of one that it was raised from; never raises."""
    texts: list[str] = []
    inner: BaseException | None = error
    while inner is not None and len(texts) < _MOST_CHAINED:
        texts.append(f"{type(inner).__name__}: {str(inner)[:_LONGEST_MESSAGE]}")
        inner = inner.__cause__ or inner.__context__
    try:
        explained = explain_text("\n".join(reversed(texts)))
    except Exception:
        # The caller reports an error already, which must not be lost (out of memory, say).
        return None
    return explained if explained is not None and explained.entry.role != "harmless" else None
