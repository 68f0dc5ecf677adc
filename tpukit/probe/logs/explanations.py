"""The explanation of one known error or exception in a log."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tpukit.errors import ConfigError
from tpukit.io.secrets import without_secrets
from tpukit.io.units import format_bytes, parse_bytes
from tpukit.knowledge.error_table import KnownError, Role

Confidence = Literal["certain", "probable", "possible"]
_PLACE = re.compile(r"\{(\w+)\}")
_OPTIONAL = re.compile(r"\[\[(.*?)(?:\|(.*?))?\]\](?!\])")


@dataclass
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
    note: str = field(default="")
    """Reason why it is not the cause."""

    @property
    def id(self) -> str:
        return self.entry.id

    @property
    def cause(self) -> str:
        cause = fill(self.entry.cause, self.captures)
        if self.entry.inferred or (self.last_resort and not self.shown):
            cause = f"Probably: {cause}"
        return " ".join(part for part in (self.shown, cause, self.note) if part)

    @property
    def fix(self) -> str:
        return f"{advise(self.captures)} {fill(self.entry.fix, self.captures)}".strip()

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

    `[[with {name}|without]]`: the first part where the log has all of its names, else the second.
    """

    def chosen(match: re.Match[str]) -> str:
        is_known = all(name in captures for name in _PLACE.findall(match[1]))
        return match[1] if is_known else match[2] or ""

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
    """What comes before the fix: a sentence on the sizes in an out-of-memory text; else empty."""
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
