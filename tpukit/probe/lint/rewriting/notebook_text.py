"""Replaces the sources of cells in a notebook's text; every other character stays."""

import json
import re
from collections.abc import Iterator, Mapping

_DECODER = json.JSONDecoder(strict=False)
_SPACE = re.compile(r"[ \t\n\r]*")


def with_sources(text: str, sources: Mapping[int | None, str]) -> str:
    """The notebook's text with new sources for some cells (their numbers, from 1)."""
    edits: list[tuple[int, int, str]] = []
    cells, _ = _members(text, _after_space(text, 0))["cells"]
    for number, (cell, _) in enumerate(_elements(text, cells), start=1):
        if number in sources:
            start, end = _members(text, cell)["source"]
            edits.append((start, end, _encoded(text[start:end], sources[number])))
    for start, end, new in reversed(edits):
        text = text[:start] + new + text[end:]
    return text


def _encoded(old: str, new: str) -> str:
    """A source as JSON in the layout of the old one; lines that stay keep their spelling."""
    ascii = old.isascii() and "\\u" in old
    if not old.startswith("["):
        return json.dumps(new, ensure_ascii=ascii)
    spans = list(_elements(old, 0))
    known = {_line(old[start:end]): old[start:end] for start, end in spans}
    head, tail, between = "[", "]", ", "
    if spans:
        head, tail = old[: spans[0][0]], old[spans[-1][1] :]
        between = old[spans[0][1] : spans[1][0]] if len(spans) > 1 else f",{head[1:]}"
    lines = new.splitlines(keepends=True)
    encoded = (known.get(line) or json.dumps(line, ensure_ascii=ascii) for line in lines)
    return head + between.join(encoded) + tail


def _line(encoded: str) -> str:
    """An element of a source; empty for one that is not a text."""
    value = json.loads(encoded, strict=False)
    return value if isinstance(value, str) else ""


def _members(text: str, at: int) -> dict[str, tuple[int, int]]:
    """The keys of an object, and the spans of their values."""
    found: dict[str, tuple[int, int]] = {}
    at = _after_space(text, at + 1)
    while text[at] != "}":
        key, at = _DECODER.raw_decode(text, at)
        start = _after_space(text, _after_space(text, at) + 1)
        _, end = _DECODER.raw_decode(text, start)
        found[key] = (start, end)
        at = _after_comma(text, end)
    return found


def _elements(text: str, at: int) -> Iterator[tuple[int, int]]:
    """The spans of a list's elements."""
    at = _after_space(text, at + 1)
    while text[at] != "]":
        _, end = _DECODER.raw_decode(text, at)
        yield at, end
        at = _after_comma(text, end)


def _after_comma(text: str, at: int) -> int:
    at = _after_space(text, at)
    return _after_space(text, at + 1) if text[at] == "," else at


def _after_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at
