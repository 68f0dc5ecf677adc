"""What a run's events say: its command, its sessions and how they ended, its warnings."""

import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tpukit.io.json_lines import NewLines, json_rows
from tpukit.train.run_folder import RunFolder

KEPT_LINES = 40
MOST_WARNINGS = 50
LONGEST_LINE = 1000
"""Characters."""


@dataclass
class LoggedWarning:
    """A warning; those that differ in numbers alone are one."""

    text: str
    """Text of the last occurrence."""
    last: datetime
    count: int = 0


class History:
    """The sessions of a run, as events.jsonl has them; `read` takes in what is new."""

    def __init__(self, folder: RunFolder) -> None:
        self.session: Mapping[str, Any] = {}
        """The last session's start: its command, model and device."""
        self.sessions = 0
        self.step = 0
        """The last step that an event names."""
        self.began: datetime | None = None
        self.ended = ""
        """What the last session ended with, as text; empty while it goes on."""
        self.failure: str | None = None
        """The error that it ended with."""
        self.warnings: dict[str, LoggedWarning] = {}
        self.tail: deque[str] = deque(maxlen=KEPT_LINES)
        """The last lines of log.txt."""
        self._events, self._lines = NewLines(folder.events), NewLines(folder.log)

    def read(self) -> None:
        """Takes in what was written since the last call."""
        self.tail.extend(line.rstrip()[:LONGEST_LINE] for line in self._lines)
        for event in json_rows(self._events):
            self._take(event, datetime.fromisoformat(event["time"]))

    def _take(self, event: Mapping[str, Any], time: datetime) -> None:
        self.step = event.get("step", self.step)
        match event["kind"]:
            case "session":
                self.session, self.ended, self.failure = event, "", None
                self.began = self.began or time
                self.sessions += 1
            case "end":
                self.ended = event["text"]
            case "failure":
                self.ended, self.failure = f"Failed: {event['text']}", event["text"]
            case "warning":
                self._warn(time, event["text"])

    def _warn(self, time: datetime, message: str) -> None:
        kind = re.sub(r"\d[\d.,e+-]*", "#", message)
        if kind in self.warnings or len(self.warnings) < MOST_WARNINGS:
            known = self.warnings.setdefault(kind, LoggedWarning(message, time))
            known.text, known.last, known.count = message, time, known.count + 1
