"""Cleans log lines: removes colours, time stamps, rank prefixes and boxes."""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_ANSI = re.compile(
    r"(?:\x1b|\\u001b|\\x1b|\\033|\^\[)"
    r"(?:\[[0-9;:?]*[ -/]*[@-~]|\][^\x07\x1b]{0,200}(?:\x07|\x1b\\)|[()][A-Z0-9]|[=>78cDEHM])"
    r"|(?<![\w\]])\[(?:\d{1,3};)*\d{1,3}m"
)
_TIME = r"\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d(?::\d\d)?(?:[.,]\d+)?(?: ?Z| ?[+-]\d\d:?\d\d)?"
_LEVEL = r"(?:DEBUG|INFO|WARN(?:ING)?|ERROR|CRITICAL|FATAL|TRACE|NOTICE)"
_PREFIX = re.compile(
    r"\s*(?:"
    r"\[?" + _TIME + r"\]?:?(?:\s+(?:std(?:out|err)\s+[FP]|[EWIF](?=\s)))?"
    r"|\[?[A-Z][a-z]{2} +\d{1,2} \d\d:\d\d:\d\d(?:\.\d+)?\]?(?: [\w.-]+ [\w./-]+(?:\[\d+\])?:)?"
    r"|\[?\d\d:\d\d:\d\d(?:[.,]\d+)?\]?"
    r"|\d{1,3}(?:\.\d{1,3}){3} \[\d+\]|\d+\.\d+s\s+\d+\s"
    r"|\[?[EWIFVDC]\d{3,4}\s+\d\d:\d\d:\d\d(?:\.\d+)?(?:\s+\d+)?(?:\s+[\w./<>-]+:\d+)?\]"
    r"|[EWIF]\d{4} \d\d:\d\d:\d{2,10}\.\d+\s+\d+ [\w./<>-]+:\d+\]"
    r"|\[[EWIF] [\w./-]+\.(?:cc|cpp|cu|h):\d+\]"
    r"|(?:\d+ )?[\w./-]+\.(?:cc|cpp|cu|py|h):\d+\]"
    r"|\[(?:rank|Rank|RANK|default|worker|node|local_rank|GPU|TPU)[ _:]?\d+\]:?"
    r"|\[\d{1,3}\](?:<std(?:err|out)>)?:|\[\d+,\d+\]<std(?:err|out)>:"
    r"|\((?:pid=|\w+ pid=)\d+[^)]{0,60}\)|[\w.-]+:\d+:\d+ \[-?\d+\] NCCL INFO(?=\s)"
    r"|(?:rank|Rank|worker|node)[-_ ]?\d+[|:](?=\s)|\d{1,3}:(?=\s)"
    r"|[\w.-]{1,40}[-_]\d+\s+\|(?=\s)|[\w.-]{1,40}\s+\|(?=\s+(?:\(\w+|\[?\d{4}-|" + _LEVEL + r"\b))"
    r"|\S+::\S+(?=\s+[EWIF]\d{4} )"
    r"|\[?" + _LEVEL + r"\]?:(?:[\w.]+[:\]])?(?=\s|\w)"
    r"|" + _LEVEL + r" \d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)? \[?[\w./<>-]+:\d+\]"
    r"|\[" + _LEVEL + r"\|[\w./-]+:\d+\] " + _TIME + r" >>|\[[\w./-]+\.py:\d+:\w+\]"
    r"|\[[\w.]+\](?=\[" + _LEVEL + r"\])|(?:[\w.<>]+:){2}\d+ -(?=\s)"
    r"|\*\*\*(?=\s(?:\w+\.)*[A-Z]\w*(?:Error|Exception)\b)|ipdb>|\(Pdb\)"
    r"|\[" + _LEVEL + r"\](?: -(?=\s))?|" + _LEVEL + r"(?=\s+[-|\[])|\|\s*" + _LEVEL + r"\s*\|"
    r"|##\[\w+\]|\[?std(?:err|out)\]?:?(?=\s)|::" + _LEVEL + r":|[│┃|╭╰╮╯─━>❱❯]+(?=\s|$)|E(?= {2,})"
    r"|-(?=\s(?:[\w.]+\s-\s|\[" + _LEVEL + r"\]))|[\w.]+ - " + _LEVEL + r" -"
    r"|\[[\w.:/ -]{1,40}\](?=\s+(?:" + _LEVEL + r"\b|\(\w+ pid=))|(?:FAILED|ERROR) \S+::\S+ -(?=\s)"
    r"|\(\w+\)(?: ERROR)?(?=\s(?:\w+\.)*[A-Z]\w*(?:Error|Exception): )"
    r"|(?:[-*] )?(?:\*\*[^*]{1,40}\*\*:? ?)?`(?=[^`]{12,}`\s*$)"
    r")"
)
_RANK = re.compile(
    r"\s*(?:\S+ \S+ )?\[?(?:rank|Rank|RANK|default|worker|local_rank)[ _:]?(\d+)\]?(?=[:|\]\s])"
)
_TRAILING_BOX = re.compile(r"\s*[│┃|╮╯]\s*$")
_MOST_PREFIXES = 6
_LEVEL_WORD = re.compile(
    r"\b(?P<word>DEBUG|INFO|WARN|ERROR|CRITICAL|FATAL|TRACE|NOTICE)"
    r"|(?:^|[\s\[])(?P<letter>[EWIF])(?=\d{3,4}[ ]|\s|$)"
)
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
            rank = _RANK.match(part) if "ank" in part or "orker" in part or "RANK" in part else None
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
