"""The explanation of one known error or exception in a log."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tpukit.io.secrets import without_secrets
from tpukit.knowledge.error_table import KnownError, Role
from tpukit.probe.logs.memory_advice import advise

Confidence = Literal["certain", "probable", "possible"]
_PLACE = re.compile(r"\{(\w+)\}")


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
        fix, advice = fill(self.entry.fix, self.captures), advise(self.captures)
        return f"{advice} {fix}" if advice else fix

    def as_json(self) -> dict[str, Any]:
        """The fields of `doctor --json`."""
        return {
            "id": self.id,
            "line": self.line,
            "cause": self.cause,
            "fix": self.fix,
            "source": self.entry.source,
            "text": without_secrets(self.text),
            "role": self.role,
            "confidence": self.confidence,
            "count": self.count,
        }


def fill(text: str, captures: Mapping[str, str]) -> str:
    """The text with `{name}` replaced by what the log has there; by NAME where it has nothing."""
    return _PLACE.sub(lambda match: captures.get(match[1], match[1].upper()), text)


def shorten(text: str, width: int) -> str:
    """The text, cut after a whole word where it is longer than `width`."""
    if len(text) <= width:
        return text
    head = text[:width]
    return f"{head[: head.rfind(' ')] if ' ' in head[width // 2 :] else head} ..."
