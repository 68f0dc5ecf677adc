"""What log.txt says of a run: its command, sessions, warnings, and when each step was done."""

import re
from collections import deque
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from tpukit.train.report.curves import NewLines, Series

KEPT_LINES = 40
MOST_WARNINGS = 50
LONGEST_LINE = 1000
"""Characters."""

_LINE = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d) (.*)", re.DOTALL)
_START = re.compile(r"Run: .*, step (\d+) of \d+; ")
_STEP = re.compile(r"step (\d+): ")
_REACHED = re.compile(r"Done: (\d+) steps|.* after step (\d+)[ .]")
_ABOUT = ("Model", "Running on", "Predicted for ")
_END = ("Done: ", "Stopped ", "Time is up ", "Failed: ")


@dataclass
class LoggedWarning:
    """A warning; those that differ in numbers alone are one."""

    text: str
    """Text of the last occurrence."""
    last: datetime
    count: int = 0


class History:
    """The sessions of a run, as log.txt has them; `read` takes in what is new."""

    def __init__(self, path: Path) -> None:
        self.command = ""
        self.about: dict[str, str] = {}
        """What the lines that begin with _ABOUT say: by what stands before the colon."""
        self.sessions = 0
        self.step = 0
        """The last step that a line names."""
        self.began: datetime | None = None
        self.ended = ""
        """The line that a session ended with."""
        self.warnings: dict[str, LoggedWarning] = {}
        self.clock = Series()
        """Seconds of all sessions until each step, pauses between sessions left out."""
        self.tail: deque[str] = deque(maxlen=KEPT_LINES)
        self._lines = NewLines(path)
        self.seconds = 0.0
        """Those of all sessions, each to its last line that names a step or an end."""
        self._last: datetime | None = None

    def read(self) -> None:
        """Takes in the lines written since the last call."""
        for line in self._lines:
            text = line.rstrip()[:LONGEST_LINE]
            self.tail.append(text)
            if match := _LINE.match(text):
                self._take(datetime.fromisoformat(match[1]), match[2])

    def _take(self, time: datetime, message: str) -> None:
        if match := _STEP.match(message):
            self._pass(time)
            self.step = int(match[1])
            self.clock.add(self.step, self.seconds)
        elif match := _START.match(message):
            self.step = int(match[1])
            self.began = self.began or time
            self.sessions += 1
            self.ended, self._last = "", time
            self.clock.cut(int(match[1]))
            self.seconds = self.clock.points[-1][1] if self.clock.points else 0.0
        elif message.startswith(_END):
            self.ended = message
            self._pass(time)
            if match := _REACHED.match(message):
                self.step = int(match[1] or match[2])
        if message.startswith("Warning") or "unexpected compilation" in message:
            self._warn(time, message)
        name, _, rest = message.partition(": ")
        if name == "Command":
            self.command = rest
        elif name.startswith(_ABOUT):
            self.about[name] = rest

    def _pass(self, time: datetime) -> None:
        if self._last is not None:
            self.seconds += max(0.0, (time - self._last).total_seconds())
        self._last = time

    def _warn(self, time: datetime, message: str) -> None:
        kind = re.sub(r"\d[\d.,e+-]*", "#", message)
        if kind in self.warnings or len(self.warnings) < MOST_WARNINGS:
            known = self.warnings.setdefault(kind, LoggedWarning(message, time))
            known.text, known.last, known.count = message, time, known.count + 1
