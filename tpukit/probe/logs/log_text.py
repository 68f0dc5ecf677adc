"""Cleans log lines: removes colours, time stamps, rank prefixes and boxes."""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tpukit.knowledge.error_table import line_forms, line_words

_ANSI = re.compile(line_forms()["lines"]["ansi"])
_TIME = r"\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d(?::\d\d)?(?:[.,]\d+)?(?: ?Z| ?[+-]\d\d:?\d\d)?"
_LEVEL = r"(?:DEBUG|INFO|WARN(?:ING)?|ERROR|CRITICAL|FATAL|TRACE|NOTICE)"
_PREFIX = re.compile(
    rf"\s*(?:{line_words('prefix')})".replace("<time>", _TIME).replace("<level>", _LEVEL)
)
_RANK = re.compile(line_forms()["lines"]["rank"])
_TRAILING_BOX = re.compile(r"\s*[│┃|╮╯]\s*$")
_MOST_PREFIXES = 6
_LEVEL_WORD = re.compile(line_forms()["lines"]["level"])
_PYTHON_WARNING = re.compile(r"(?:\S+\.py:\d+: )?(?:[\w.]+\.)?\w*Warning: ")
_LETTERS = {"DEBUG": "I", "INFO": "I", "TRACE": "I", "NOTICE": "I", "WARN": "W", "ERROR": "E",
            "CRITICAL": "E", "FATAL": "F"}  # fmt: skip
_BAR = {ord(c): None for c in "0123456789.,:-+ =#>|%[]/?<█▏▎▍▌▋▊▉━╸╺"}


class Line(NamedTuple):
    """One line of a log."""

    number: int
    """Counted from 1."""
    text: str
    """Cleaned."""
    stream: str
    """The rank that wrote it, where the line names one; else empty."""
    level: str = ""
    """I, W, E or F, where the line names a level; else empty."""
    indented: bool = False
    """By two spaces or more, after its prefixes."""


def clean_lines(numbered: Iterable[tuple[int, str]]) -> Iterator[Line]:
    """Lines without colours and prefixes, also split at a progress bar's carriage returns."""
    for number, raw in numbered:
        text = _ANSI.sub("", raw) if "\x1b" in raw or "[" in raw else raw
        for part in drop_updates(text) if "\r" in text else (text,):
            may_name_rank = any(word in part for word in ("ank", "orker", "RANK", "] "))
            rank = _RANK.match(part) if may_name_rank else None
            start = _end_of_prefixes(part)
            rest = part[start:]
            yield Line(
                number,
                _strip_box(part, start),
                rank.group(1) if rank else "",
                _level(part[:start], rest),
                rest.startswith(("  ", "\t", " \t")) and part[:start] != "E",
            )


def drop_updates(text: str) -> list[str]:
    """The parts between carriage returns, without those that differ by numbers and bars only."""
    seen: set[str] = set()
    parts = [part for part in text.split("\r") if part.strip()]
    kept = []
    for index, part in enumerate(parts):
        shape = part.translate(_BAR)
        if shape not in seen or index == len(parts) - 1:
            seen.add(shape)
            kept.append(part)
    return kept or [""]


def _end_of_prefixes(text: str) -> int:
    start = 0
    for _ in range(_MOST_PREFIXES):
        found = _PREFIX.match(text, start)
        if found is None or found.end() == start:
            break
        start = found.end()
    return start


def _strip_box(text: str, start: int) -> str:
    if start or text[-1:] in "│┃|╮╯":
        return _TRAILING_BOX.sub("", text[start:]).strip()
    return text.strip()


def _level(prefix: str, rest: str) -> str:
    """The highest level that a line's prefixes name; Python's warnings are of level W, except
    where pytest raises them."""
    if not prefix.endswith("E") and _PYTHON_WARNING.match(rest.lstrip()[:400]):
        return "W"
    found = (
        _LETTERS[match["word"]] if match["word"] else match["letter"]
        for match in _LEVEL_WORD.finditer(prefix)
    )
    return max(found, key="IWEF".index, default="")
