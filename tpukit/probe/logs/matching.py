"""Error texts that are known: their cause, their fix and where that is known from.

explain_text(text)      the first cause in a text, or None
is_out_of_memory(text)  whether a text says that memory ran out, in any of the known forms
read_entries(paths)     the knowledge, with a person's own files
Matcher(entries)        finds every known text in lines, piece by piece
"""

from __future__ import annotations

import re
import tomllib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import tpukit.knowledge
from tpukit.errors import DataError
from tpukit.probe.logs.log_text import Line, clean_lines
from tpukit.probe.logs.memory_advice import advise
from tpukit.probe.logs.patterns import FlowPattern, squeeze

Role = Literal["cause", "consequence", "warning", "harmless"]
ROLES: tuple[Role, ...] = ("cause", "consequence", "warning", "harmless")
TABLES = Path(tpukit.knowledge.__file__).parent / "tables" / "errors"
OUT_OF_MEMORY = "out-of-memory"
_NEARBY_LINES = 60
_NEARBY_CHARACTERS = 3000
_MOST_COUNTED = 20_000
_MOST_CHAINED = 8
_LONGEST_MESSAGE = 20_000
_FIELDS = {
    "id": str,
    "cause": str,
    "fix": str,
    "source": str,
    "topic": str,
    "role": str,
    "match": list,
    "regex": list,
    "hints": list,
    "needs": list,
    "below": list,
    "inferred": bool,
}


@dataclass(frozen=True)
class Entry:
    """One known text, in its forms."""

    id: str
    cause: str
    fix: str
    source: str = ""
    topic: str = ""
    role: Role = "cause"
    flows: tuple[FlowPattern, ...] = ()
    """Texts of the small language (see `tpukit.probe.logs.patterns`), the most telling first."""
    regexes: tuple[re.Pattern[str], ...] = ()
    """Regular expressions for one cleaned line."""
    hints: tuple[str, ...] = ()
    """One of these is in every line that a regular expression matches."""
    needs: tuple[str, ...] = ()
    """One of these must stand nearby: the text alone says too little."""
    below: tuple[str, ...] = ()
    """Entries that say the same more exactly: found nearby, they replace this one."""
    inferred: bool = False
    """The cause was read from code; nobody who must know has stated it."""


@dataclass
class Explanation:
    """A known text that was found."""

    entry: Entry
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
        said = self.entry.cause
        return f"Probably: {said}" if self.entry.inferred else said

    @property
    def fix(self) -> str:
        advice = advise(self.captures)
        return f"{advice} {self.entry.fix}" if advice else self.entry.fix

    def as_json(self) -> dict[str, Any]:
        """The fields that `doctor --json` promises, and what else is known."""
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
    """Finds known texts in lines that are fed piece by piece."""

    entries: Sequence[Entry]
    found: dict[str, Explanation] = field(default_factory=dict)
    _kept: list[Line] = field(default_factory=list)
    _counted: dict[str, set[int]] = field(default_factory=dict)

    def feed(self, lines: Iterable[Line]) -> None:
        """Looks at further lines, together with the last ones of the piece before."""
        fresh = list(lines)
        seen_until = self._kept[-1].number if self._kept else 0
        everything = [*self._kept, *fresh]
        self._kept = everything[-_NEARBY_LINES:]
        for stream in _streams(everything):
            self._search_flows(stream, seen_until)
        self._search_lines(fresh)

    def explanations(self) -> list[Explanation]:
        """What was found: causes first, then what follows from them, then warnings."""
        kept = [e for e in self.found.values() if not self._replaced(e)]
        return sorted(kept, key=lambda e: (ROLES.index(e.entry.role), e.line))

    def _search_flows(self, lines: Sequence[Line], seen_until: int) -> None:
        pieces = [squeeze(line.text) for line in lines]
        squeezed, ends = "".join(pieces), list(accumulate(map(len, pieces)))
        for entry in self.entries:
            for pattern in entry.flows:
                self._count(entry, pattern, squeezed, ends, lines, seen_until)

    def _count(
        self,
        entry: Entry,
        pattern: FlowPattern,
        squeezed: str,
        ends: list[int],
        lines: Sequence[Line],
        seen_until: int,
    ) -> None:
        """Every match of one pattern; one that lies in lines seen before was counted before."""
        match = pattern.search(squeezed)
        while match is not None:
            around = squeezed[
                max(0, match.start() - _NEARBY_CHARACTERS) : match.end() + _NEARBY_CHARACTERS
            ]
            last = lines[bisect_right(ends, max(match.end() - 1, 0))]
            if last.number > seen_until and _has_one(around, entry.needs):
                first = lines[bisect_right(ends, match.start())]
                self._note(entry, first, last.number, match)
            match = pattern.search(squeezed, max(match.end(), match.start() + 1))

    def _search_lines(self, lines: Sequence[Line]) -> None:
        everything = "\n".join(line.text for line in lines)
        for entry in self.entries:
            if not entry.regexes or not _has_one(everything, entry.hints):
                continue
            for line in lines:
                if _has_one(line.text, entry.hints):
                    self._match_line(entry, line)

    def _match_line(self, entry: Entry, line: Line) -> None:
        for regex in entry.regexes:
            match = regex.search(line.text[:4000])
            if match is not None:
                self._note(entry, line, line.number, match)
                return

    def _note(self, entry: Entry, line: Line, last: int, match: re.Match[str]) -> None:
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
    """The lines of each rank (a text wrapped over lines is broken by another rank's lines), and
    all of them together where several wrote."""
    by_rank: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        by_rank[line.stream].append(line)
    return [list(lines), *by_rank.values()] if len(by_rank) > 1 else [list(lines)]


def _has_one(text: str, words: Sequence[str]) -> bool:
    return not words or any(word in text for word in words)


def explain_text(text: str, entries: Sequence[Entry] | None = None) -> Explanation | None:
    """The first cause that is known in a short text (an exception's, say), or None."""
    matcher = Matcher(known_entries() if entries is None else entries)
    matcher.feed(clean_lines(enumerate(text.split("\n"), start=1)))
    explained = matcher.explanations()
    return explained[0] if explained else None


def explain_exception(error: BaseException) -> Explanation | None:
    """What is known about an exception, or about one that it followed from; never raises."""
    texts: list[str] = []
    inner: BaseException | None = error
    while inner is not None and len(texts) < _MOST_CHAINED:
        texts.append(f"{type(inner).__name__}: {str(inner)[:_LONGEST_MESSAGE]}")
        inner = inner.__cause__ or inner.__context__
    try:
        explained = explain_text("\n".join(reversed(texts)))
    except Exception:
        # The boundary that asks has an error to report already (memory may be what lacks).
        return None
    return explained if explained is not None and explained.entry.role != "harmless" else None


def is_out_of_memory(text: str) -> bool:
    """Whether a text says, in any known form, that a device's or the host's memory ran out."""
    entries = [entry for entry in known_entries() if entry.topic == OUT_OF_MEMORY]
    return explain_text(text, entries) is not None


@cache
def known_entries() -> tuple[Entry, ...]:
    """The knowledge that comes with the package."""
    return tuple(read_entries([]))


def read_entries(own_files: Sequence[Path]) -> list[Entry]:
    """The package's entries and a person's own, which replace those of the same id.

    Raises DataError naming file, entry and field.
    """
    entries: dict[str, Entry] = {}
    for path in [*sorted(TABLES.glob("*.toml")), *own_files]:
        for entry in _read_file(path):
            entries[entry.id] = entry
    return list(entries.values())


def _read_file(path: Path) -> list[Entry]:
    try:
        with path.open("rb") as file:
            tables = tomllib.load(file)
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror or error})", "Name a TOML file with entries."
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{path}: no TOML: {error}", _EXAMPLE) from None
    raw = tables.get("error")
    if not isinstance(raw, list) or not all(isinstance(table, dict) for table in raw):
        raise DataError(f"{path}: holds no [[error]] entries", _EXAMPLE)
    return [_entry(table, f"{path}, entry {i}") for i, table in enumerate(raw, start=1)]


_EXAMPLE = (
    'An entry: [[error]], id = "my-error", match = ["the text with <n> for numbers"], '
    'cause = "...", fix = "...".'
)


def _entry(table: dict[str, Any], where: str) -> Entry:
    _check_fields(table, where)
    flows = tuple(FlowPattern(text) for text in table.get("match", ()))
    if any(len(flow.needle) < 4 for flow in flows):
        raise DataError(f"{where}: a `match` needs a fixed word of at least 4 letters", _EXAMPLE)
    rest: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in table.items()
        if key not in ("match", "regex")
    }
    rest["needs"] = tuple(map(squeeze, table.get("needs", ())))
    return Entry(flows=flows, regexes=_regexes(table.get("regex", ()), where), **rest)


def _check_fields(table: dict[str, Any], where: str) -> None:
    for name, value in table.items():
        if name not in _FIELDS:
            raise DataError(f"{where}: unknown field `{name}`", f"Fields: {', '.join(_FIELDS)}.")
        if not isinstance(value, _FIELDS[name]) or (
            isinstance(value, list) and not all(isinstance(item, str) for item in value)
        ):
            wanted = "a list of texts" if _FIELDS[name] is list else _FIELDS[name].__name__
            raise DataError(f"{where}: `{name}` must be {wanted}", _EXAMPLE)
    for name in ("id", "cause", "fix"):
        if not table.get(name):
            raise DataError(f"{where}: `{name}` is missing", _EXAMPLE)
    if not table.get("match") and not table.get("regex"):
        raise DataError(f"{where}: neither `match` nor `regex` is given", _EXAMPLE)
    if table.get("role", "cause") not in ROLES:
        raise DataError(f"{where}: unknown role {table['role']!r}", f"Roles: {', '.join(ROLES)}.")


def _regexes(texts: Iterable[str], where: str) -> tuple[re.Pattern[str], ...]:
    try:
        return tuple(re.compile(text) for text in texts)
    except (re.error, RecursionError, OverflowError) as error:
        raise DataError(
            f"{where}: `regex` is no regular expression: {error}", "`match` needs none."
        ) from None
