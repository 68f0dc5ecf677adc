"""The explanation of one known error or exception in a log."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tpukit.errors import ConfigError
from tpukit.io.secrets import without_secrets
from tpukit.io.units import format_bytes, parse_bytes
from tpukit.knowledge.error_table import KnownError, Role
from tpukit.probe.logs.tracebacks import Raised

Confidence = Literal["certain", "probable", "possible"]
_PLACE = re.compile(r"\{(\w+)\}")
_OPTIONAL = re.compile(r"\[\[((?:(?!\[\[).)*?)(?:\|((?:(?!\[\[).)*?))?\]\](?!\])")
"""The innermost optional part."""
_GUESS = "No entry of the table knows this text. By its words alone, perhaps:"
_MORE = "Add the lines above it to the log, a traceback from its start: they show who raised it."


@dataclass(frozen=True)
class Explanation:
    """A known error that was found, or an exception that ended a run."""

    entry: KnownError
    line: int
    """The first line it was found on, from 1."""
    text: str
    """That line, cleaned."""
    captures: dict[str, str]
    count: int = 1
    role: Role = "cause"
    confidence: Confidence = "certain"
    stream: str = ""
    """The rank that wrote it, where the line names one."""
    last: int = 0
    """The last line it was found on."""
    mild: bool = False
    """Only warned of, or tried again."""
    last_resort: bool = False
    """A cause only where there is no other."""
    shown: str = ""
    """A sentence that quotes the exception and names the user's line."""
    note: str = ""
    """Reason why it is not the cause."""
    raised: Raised | None = None
    """The exception, where the log shows one."""
    place: str = ""
    """What the place where it was raised shows."""
    place_fix: str = ""
    leads: bool = False
    """Whether that replaces the entry's own text."""
    warned: str = ""
    """A sentence on advice that this machine does not allow."""
    guessed: bool = False
    """Whether loose words of the message alone chose the entry."""

    @property
    def id(self) -> str:
        return self.entry.id

    @property
    def cause(self) -> str:
        return " ".join(filter(None, (self.reason, self.place, self.note)))

    @property
    def reason(self) -> str:
        """The exception and, where the place does not replace it, the entry's cause."""
        if self.leads:
            return self.shown
        cause = fill(self.entry.cause, self.captures)
        if self.entry.inferred or (self.last_resort and not self.shown):
            cause = f"Probably: {cause}"
        cause = f"{_GUESS} {cause}" if self.guessed else cause
        return f"{self.shown} {cause}".strip()

    @property
    def fix(self) -> str:
        return " ".join(filter(None, (self.advice, self.advice_of_place)))

    @property
    def advice(self) -> str:
        """The entry's advice, where the place does not replace it."""
        if self.leads and self.place_fix:
            return ""
        is_alone = self.raised is not None and not self.raised.frames
        more = _MORE if is_alone and (self.guessed or self.id.startswith("unknown-")) else ""
        advised = advise(self.captures), fill(self.entry.fix, self.captures), more, self.warned
        return " ".join(filter(None, advised))

    @property
    def advice_of_place(self) -> str:
        """What makes the condition of the `raise` false, or replaces a name."""
        is_second = self.place_fix and self.advice
        return f"Or by the condition: {self.place_fix}" if is_second else self.place_fix

    def as_json(self) -> dict[str, Any]:
        """The fields of `doctor --json`."""
        return {
            "id": self.id,
            "line": self.line,
            "cause": without_secrets(self.cause),
            "fix": without_secrets(self.fix),
            "source": self.entry.source,
            "text": without_secrets(self.text),
            "role": self.role,
            "confidence": self.confidence,
            "count": self.count,
        }


def fill(text: str, captures: Mapping[str, str]) -> str:
    """The text with `{name}` replaced by what the log has there; by NAME where it has nothing.

    `[[with {name}|without]]`: the first part where the log has all of its names, else the second,
    which may hold such a part itself.
    """

    def chosen(match: re.Match[str]) -> str:
        is_known = all(name in captures for name in _PLACE.findall(match[1]))
        return match[1] if is_known else match[2] or ""

    while _OPTIONAL.search(text):
        text = _OPTIONAL.sub(chosen, text)
    text = _PLACE.sub(lambda match: captures.get(match[1], match[1].upper()), text)
    return re.sub("^the program", "The program", text.strip())


def shorten(text: str, width: int) -> str:
    """The text, cut after a whole word where it is longer than `width`."""
    if len(text) <= width:
        return text
    head = text[:width]
    return f"{head[: head.rfind(' ')] if ' ' in head[width // 2 :] else head} ..."


def logged_bytes(text: str) -> int | None:
    """`21.84G`, `180.59M` or `17179869184` in bytes: logs mean 2^30 by G. None for other text."""
    try:
        return parse_bytes(re.sub(r"([KMGT])i?B?\.?$", r"\1iB", text.strip().replace(",", "")))
    except ConfigError:
        return None


def advise(captures: Mapping[str, str]) -> str:
    """What comes before the fix: a sentence on the sizes in an out-of-memory text, or on the name
    of a list that a value is most like; else empty."""
    if "nearest" in captures:
        return f"Of those listed `{captures['nearest']}` is nearest."
    sizes = {name: logged_bytes(value) for name, value in captures.items()}
    asked, limit = sizes.get("asked_bytes"), sizes.get("limit_bytes")
    if asked and limit:
        share = asked / limit
        small = "fine" if share >= 0.25 else "the batch can grow"
        text = "over the limit" if share > 1 else "near the limit" if share >= 0.5 else small
        return f"Requested: {format_bytes(asked)} of {format_bytes(limit)} a chip: {text}."
    wanted, free, piece = (sizes.get(name) for name in ("asked", "free", "reservable"))
    if wanted and free and piece and piece < wanted <= free:
        return (
            f"Requested: {format_bytes(wanted)}; {format_bytes(free)} are free, but only "
            f"{format_bytes(piece)} of them in one piece (fragmentation)."
        )
    if wanted and free and wanted > free:
        return f"Requested: {format_bytes(wanted)}; free: {format_bytes(free)}."
    used, capacity = sizes.get("used"), sizes.get("capacity")
    if used and capacity and used > capacity:
        sizes_text = f"{format_bytes(capacity)} / {format_bytes(used)}"
        return f"Scale the batch by about {capacity / used:.2f} ({sizes_text})."
    return ""
