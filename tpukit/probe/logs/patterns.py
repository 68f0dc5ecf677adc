"""`match` texts of the error table as patterns, and how they are found in a log.

They are matched against text without any white space, so that a line wrapped by a terminal, even
in the middle of a word, still matches.
"""

import re
from functools import cache, cached_property

from tpukit.knowledge.error_table import PLACEHOLDER, QUOTES, fixed_parts

_VARYING = {
    "n": r"[-+]?(?:0x[0-9a-fA-F]+|\d(?:[\d,._]*\d)?)(?:[eE][-+]?\d+)?(?:[KMGT]i?B?)?",
    "w": r"[\w./:\-\[\]{}()%+@~#$\\?=&,*]{0,120}?",
    "*": r".{0,240}?",
}
_ANY_QUOTE = f"[{QUOTES}\\\\]{{0,2}}"


def squeeze(text: str) -> str:
    """The text without its white space."""
    return "".join(text.split())


class FlowPattern:
    """One `match` text, searched in squeezed text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.needle = max(fixed_parts(text), key=len)
        """Text without it cannot match; a quick test before the regular expression."""

    @cached_property
    def regex(self) -> re.Pattern[str]:
        parts, end, kind, name = [], 0, "", None
        for place in PLACEHOLDER.finditer(self.text):
            parts.append(_literal(self.text[end : place.start()]))
            kind, name = place.groups()
            parts.append(f"(?P<{name}>{_VARYING[kind]})" if name else f"(?:{_VARYING[kind]})")
            end = place.end()
        if name and self.text[end:] and not self.text[end:].strip(QUOTES):
            # A quote may be missing; of a name at the end it is what ends it.
            parts[-1] = rf"(?:(?P<{name}>[\w.]{{1,120}})(?=[{QUOTES}]))?"
        parts.append(_literal(self.text[end:]))
        return re.compile("".join(parts))

    def search(self, squeezed: str, start: int = 0) -> re.Match[str] | None:
        """The first match at or after `start`."""
        if squeezed.find(self.needle, start) < 0:
            return None
        return self.regex.search(squeezed, start)


@cache
def flow_pattern(text: str) -> FlowPattern:
    """The pattern of a `match` text, built once."""
    return FlowPattern(text)


def _literal(text: str) -> str:
    """Fixed words as a regular expression in which every kind of quote matches any other."""
    return "".join(_ANY_QUOTE if c in QUOTES else re.escape(c) for c in squeeze(text))
