"""Finds known errors in text: in a log's lines, piece by piece, or in an exception."""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from tpukit.knowledge.error_table import ROLES, KnownError, known_errors, line_words
from tpukit.probe.logs.explanations import Confidence, Explanation, shorten
from tpukit.probe.logs.log_text import Line, clean_lines
from tpukit.probe.logs.patterns import FlowPattern, flow_pattern, squeeze
from tpukit.probe.logs.quoting import LINES, is_quoted
from tpukit.probe.logs.ranking import ranked

_NEARBY_LINES = 60
_NEARBY_CHARACTERS = 3000
_MOST_COUNTED = 20_000
_LONGEST_LINE = 4000
_LONGEST_SHOWN = 300
_RETRY = re.compile(line_words("retry"))

_BEFORE = re.compile(r"(?:(?:[A-Za-z_][\w.]*|[A-Z][\w ]{0,24}): ?|\(\d+\) ?|[->*] )*")
"""What may stand before a text that is the whole message; after other words it is a part of one,
whose cause the other words may decide."""


@dataclass(frozen=True)
class Matches:
    """The texts of the table that a log shows."""

    by_id: Mapping[str, Explanation]
    own: Sequence[str]
    """Ids without those that a more specific entry nearby explains."""
    lines: Mapping[int, str]
    """Line on which a text stands -> id of what explains it best."""


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
        everything = [*self._kept, *fresh]
        for stream, known in _streams(everything, len(self._kept)):
            self._search_flows(stream, known)
        self._kept = everything[-_NEARBY_LINES:]
        self._search_lines(fresh)

    def explanations(self) -> list[Explanation]:
        """The explanations: causes first, then consequences, warnings and harmless messages."""
        matches = self.matches()
        return ranked([matches.by_id[name] for name in matches.own])

    def matches(self) -> Matches:
        """What was found so far."""
        by_id, replaced = dict(self.found), set()
        for explanation in self.found.values():
            for other in self._more_specific(explanation):
                replaced.add(explanation.id)
                if explanation.role == "cause" and not explanation.mild:
                    # A warning that names why the general error ended the run.
                    by_id[other] = replace(by_id[other], mild=False)
        by_role = sorted(
            self.found.values(), key=lambda e: (-ROLES.index(e.role), e.id not in replaced)
        )
        lines = {line: e.id for e in by_role for line in self._counted[e.id]}
        return Matches(by_id, [name for name in by_id if name not in replaced], lines)

    def _search_flows(self, lines: Sequence[Line], known: int) -> None:
        pieces = [squeeze(line.text) for line in lines]
        squeezed, ends = "".join(pieces), list(accumulate(map(len, pieces)))
        for entry in self.entries:
            for text in entry.match:
                self._count(entry, flow_pattern(text), squeezed, ends, lines, known)

    def _count(
        self,
        entry: KnownError,
        pattern: FlowPattern,
        squeezed: str,
        ends: list[int],
        lines: Sequence[Line],
        known: int,
    ) -> None:
        """Notes every match of one pattern that ends after the first `known` lines."""
        match = pattern.search(squeezed)
        while match is not None:
            around = squeezed[
                max(0, match.start() - _NEARBY_CHARACTERS) : match.end() + _NEARBY_CHARACTERS
            ]
            last = bisect_right(ends, max(match.end() - 1, 0))
            needs = [squeeze(word) for word in entry.needs]
            if last >= known and _has_one(around, needs):
                first = bisect_right(ends, match.start())
                before = ends[first - 1] if first else 0
                start = _unsqueezed(lines[first].text, match.start() - before)
                self._note(entry, lines[first], lines[last].number, match, start)
            match = pattern.search(squeezed, max(match.end(), match.start() + 1))

    def _search_lines(self, lines: Sequence[Line]) -> None:
        everything = "\n".join(line.text for line in lines)
        for entry in self.entries:
            if not (entry.regex or entry.last_resort) or not _has_one(everything, entry.hints):
                continue
            for line in lines:
                if _has_one(line.text, entry.hints):
                    self._match_line(entry, line)

    def _match_line(self, entry: KnownError, line: Line) -> None:
        for regex in (*entry.regex, *entry.last_resort):
            match = regex.search(line.text[:_LONGEST_LINE])
            if match is not None:
                weak = regex in entry.last_resort
                self._note(entry, line, line.number, match, match.start(), weak)
                return

    def _note(
        self,
        entry: KnownError,
        line: Line,
        last: int,
        match: re.Match[str],
        start: int,
        weak: bool = False,
    ) -> None:
        mild = _is_mild(entry, line)
        if _can_be_quoted(entry) and is_quoted(line, start):
            return
        is_all = _BEFORE.fullmatch(line.text[:start]) is not None
        is_sure = entry.is_certain and is_all and not weak
        confidence: Confidence = "certain" if is_sure else "probable"
        known = self.found.get(entry.id)
        counted = self._counted.setdefault(entry.id, set())
        is_new = line.number not in counted and last not in counted
        if len(counted) < _MOST_COUNTED:
            counted.update((line.number, last))
        captures = {name: value for name, value in match.groupdict().items() if value}
        if known is None or (known.mild, known.last_resort) > (mild, weak):
            count = is_new + (known.count if known else 0)
            self.found[entry.id] = Explanation(
                entry, line.number, shorten(line.text, _LONGEST_SHOWN), captures, count, entry.role,
                confidence, line.stream, last, mild, weak,
            )  # fmt: skip
            return
        known = replace(known, last=max(known.last, last), count=known.count + is_new)
        if (known.mild, known.last_resort) == (mild, weak):
            known = replace(known, captures={**captures, **known.captures})
            if line.number < known.line:
                text = shorten(line.text, _LONGEST_SHOWN)
                known = replace(known, line=line.number, text=text)
        self.found[entry.id] = known

    def _more_specific(self, explanation: Explanation) -> list[str]:
        """The ids of entries found nearby that explain it better."""
        others = [self.found[other] for other in explanation.entry.below if other in self.found]
        return [o.id for o in others if abs(o.line - explanation.line) <= _NEARBY_LINES]


def _can_be_quoted(entry: KnownError) -> bool:
    return entry.role in ("cause", "consequence") and entry.topic != "non-finite"


def _is_mild(entry: KnownError, line: Line) -> bool:
    """Whether a line only warns of an error or says that it is tried again."""
    settled = entry.role in ("warning", "harmless") or entry.topic == "non-finite"
    if settled or LINES["loud"].match(line.text):
        return False
    return line.level in ("W", "I") or bool(_RETRY.search(line.text))


def _streams(lines: Sequence[Line], known: int) -> list[tuple[list[Line], int]]:
    """All lines, and where several ranks wrote, those of each: another rank's lines interrupt a
    wrapped text. Each with the number of its lines that are among the first `known`."""
    by_rank: dict[str, list[Line]] = defaultdict(list)
    known_of: dict[str, int] = defaultdict(int)
    for index, line in enumerate(lines):
        by_rank[line.stream].append(line)
        known_of[line.stream] += index < known
    whole = [(list(lines), known)]
    if len(by_rank) == 1:
        return whole
    return whole + [(of_rank, known_of[rank]) for rank, of_rank in by_rank.items()]


def _unsqueezed(text: str, offset: int) -> int:
    """Where the character stands in the text that is number `offset` without white space."""
    for index, character in enumerate(text):
        if not character.isspace():
            if offset == 0:
                return index
            offset -= 1
    return len(text)


def _has_one(text: str, words: Sequence[str]) -> bool:
    return not words or any(word in text for word in words)


def explain_text(text: str, entries: Sequence[KnownError] | None = None) -> Explanation | None:
    """The first known cause in a short text (an exception's, say), or None."""
    matcher = Matcher(known_errors() if entries is None else entries)
    matcher.feed(clean_lines(enumerate(text.split("\n"), start=1)))
    explained = matcher.explanations()
    return explained[0] if explained else None
