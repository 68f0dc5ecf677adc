"""The small language in which a known text is written, and how it is found in a log.

A pattern is the text itself with places that vary: `<n>` a number (with its unit), `<w>` one name,
path or address, `<*>` anything short; `<n:used>` keeps what was found as `used`. Patterns are
matched against text without any white space, so that a line wrapped by a terminal, even in the
middle of a word, still matches.
"""

from __future__ import annotations

import re
from functools import cached_property

_PLACE = re.compile(r"<(n|w|\*)(?::(\w+))?>")
_VARYING = {
    "n": r"[-+]?(?:0x[0-9a-fA-F]+|\d[\d,._]*)(?:[eE][-+]?\d+)?(?:[KMGT]i?B?)?",
    "w": r"[\w./:\-\[\]{}()%+@~#$\\?=&,*]{0,120}?",
    "*": r".{0,240}?",
}
_QUOTES = "\"'`‘’“”´"
_ANY_QUOTE = f"[{_QUOTES}\\\\]{{0,2}}"


def squeeze(text: str) -> str:
    """The text without its white space."""
    return "".join(text.split())


class FlowPattern:
    """One text of the small language, looked for in squeezed text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.needle = _needle(text)

    @cached_property
    def regex(self) -> re.Pattern[str]:
        parts, end = [], 0
        for place in _PLACE.finditer(self.text):
            parts.append(_literal(self.text[end : place.start()]))
            kind, name = place.groups()
            parts.append(f"(?P<{name}>{_VARYING[kind]})" if name else f"(?:{_VARYING[kind]})")
            end = place.end()
        parts.append(_literal(self.text[end:]))
        return re.compile("".join(parts))

    def search(self, squeezed: str, start: int = 0) -> re.Match[str] | None:
        """The first match at or after `start`."""
        if squeezed.find(self.needle, start) < 0:
            return None
        return self.regex.search(squeezed, start)


def _literal(text: str) -> str:
    """Fixed words as a regular expression: one quote is as good as another."""
    return "".join(_ANY_QUOTE if c in _QUOTES else re.escape(c) for c in squeeze(text))


def _needle(text: str) -> str:
    """The longest run of fixed characters: whatever lacks it cannot match."""
    without_places = _PLACE.sub("\0", text)
    runs = re.split(f"[\0{_QUOTES}]", without_places)
    return max(map(squeeze, runs), key=len)
