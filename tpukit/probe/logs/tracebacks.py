"""Finds the exceptions that a log shows: class, message, frames, and what they were raised from."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tpukit.knowledge.error_table import line_forms, line_words
from tpukit.probe.logs.log_text import Line
from tpukit.probe.logs.quoting import LINES, is_quoted

_START = re.compile(r"Traceback \(most recent calls? (?:last|first)\)")
_CHILD = re.compile(r"-- Process \d+ terminated with the following error")
_SOFT = re.compile(line_words("soft"))
"""Text above the traceback of an exception that the program handled."""
_FORMS = line_forms()
_FRAMES = [re.compile(form) for form in _FORMS["frames"]]
_ARROW = re.compile(r"-{2,}> ?(?P<line>\d+) (?P<code>.*)")
_MARKERS = re.compile(r"[~^]+$")
"""The marks below a frame's code, which an exception follows, also in an indented excerpt."""
_OF_A_MODULE = re.compile(r"(?:[a-z_]\w*\.)+[A-Z]\w*(?:Error|Exception): [A-Z]{2}")
"""An exception with its module and a status in capitals (jax's), which counts also where the log is
indented."""
_CLASSLESS = [(re.compile(row["form"]), row["name"], row["counts"]) for row in _FORMS["form"]]
"""Failures without a class: the form, the name and where it counts."""
_WORDINGS = [(re.compile(row["form"]), row["name"]) for row in _FORMS["wording"]]
_UNFINISHED = re.compile(rf"(?:{line_words('unfinished')})$")
"""End of a message that the program (or a terminal) has wrapped."""
_WARNING = re.compile(r"\w*Warning$")
_SAID = ("said", "hard")
_WITHOUT_CLASS = (
    "", "error", "compiler error", "exception in a process", "failed check", "terminate"
)  # fmt: skip
"""Names of failures without a class."""
_SAYS = re.compile(line_words("says"))
"""What a program says where it reports an exception in its own words."""
_PLAIN = str.maketrans("‘’“”", "''\"\"")
_MOST_RAISED = 2000
_MOST_LOGGED = 60
_MOST_FRAMES = 400
_MOST_SILENT = 60
_MOST_SOURCE = 5
_MOST_DETAILS = 800
"""Characters, of one line at most half."""
LIBRARY = re.compile(line_words("library"))
PASSING_CALLS = frozenset(_FORMS["words"]["passing_calls"])
"""Functions that pass on a call or the lookup of a name, for whoever asks."""
WRAPPING_CALLS = PASSING_CALLS | frozenset(_FORMS["words"]["wrapping_calls"])
"""Functions around the one that raises."""
_PACKAGE = re.compile(r"(?:site|dist)-packages[/\\]([\w.-]+)")
_PLUGIN = re.compile(r"[/\\](?:custom_nodes|extensions|plugins|transformers_modules)[/\\]([\w.-]+)")
_KNOWN_PACKAGE = re.compile(
    rf"(?:^|(?<!scripts)[/\\])({line_words('packages')})[/\\](?!.*\bexamples[/\\])(?=.*\.py$)"
)
"""Packages that are often run from a checkout."""


@dataclass
class Frame:
    """One call of a traceback."""

    path: str
    line: int
    code: str = ""
    where: str = ""
    """The function; `<module>` where a module is imported or a script runs."""
    marks: str = ""
    """What Python prints below the code: `~~~^^^`, the part that was run."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Values of a record: plain ones as written, tensors as shape, dtype and device."""
    module: str = ""
    """The name, within the model, of the module whose method it is; of a record."""

    @property
    def place(self) -> str:
        """`train.py:88`, without the folder."""
        file = re.split(r"[/\\]", self.path)[-1]
        return f"{file}:{self.line}" if self.line else file

    @property
    def library(self) -> str:
        """The package below `site-packages`; empty for other code."""
        found = _PACKAGE.search(self.path)
        return found[1].removesuffix(".py") if found else ""

    @property
    def package(self) -> str:
        """The package whose code this is: an installed one, a model's own code, a plug-in."""
        found = _PLUGIN.search(self.path) or _KNOWN_PACKAGE.search(self.path)
        is_within = found and f"/{found[1]}/{found[1]}/" in self.path.replace("\\", "/")
        is_script = not self.library and self.where == "<module>" and not is_within
        return self.library or (found[1] if found and not is_script else "")

    @property
    def is_plugin(self) -> bool:
        """Whether it is a plug-in's code, or a model's own."""
        return _PLUGIN.search(self.path) is not None

    @property
    def is_users(self) -> bool:
        """Whether it is code that belongs to no known library."""
        return not self.in_library and (self.is_plugin or not self.package)

    @property
    def passes_on(self) -> bool:
        """Whether it only passes on a call or a name's lookup that another frame asks for."""
        return self.where in PASSING_CALLS or self.path.endswith("torch/nn/modules/module.py")

    @property
    def in_library(self) -> bool:
        return LIBRARY.search(self.path) is not None


@dataclass
class Raised:
    """One exception that a log shows."""

    name: str
    """As printed: `torch.OutOfMemoryError`."""
    message: str
    line: Line
    frames: list[Frame] = field(default_factory=list)
    first_line: int = 0
    """First line of its traceback."""
    last_line: int = 0
    """Last line of its message."""
    details: str = ""
    """The next lines, which belong to its message where nothing else is there."""
    source: Raised | None = None
    """The exception that it was raised from, or while handling which it was raised."""
    while_handling: bool = False
    is_report: bool = False
    """A launcher's report of another process's exception, which follows."""
    is_handled: bool = False
    """The line above its traceback says that the program goes on without it."""
    is_logged: bool = False
    """A program reports a failure in its own words, perhaps without the class."""
    native_call: str = ""
    """The innermost function that a stack of torch_xla's C++ below it names: `GetDeviceKind`."""

    def add_detail(self, text: str, number: int) -> None:
        """Adds the line after the last one, if there are not too many."""
        if len(self.details) < _MOST_DETAILS:
            self.details = f"{self.details}\n{text[: _MOST_DETAILS // 2]}".lstrip("\n")
            self.last_line = number

    @property
    def has_class(self) -> bool:
        """Whether the log names its class, which is not inferred or a name of the reader's own."""
        return self.name not in _WITHOUT_CLASS and self.name in self.line.text

    @property
    def class_name(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def users_frame(self) -> Frame | None:
        """The innermost frame of code that belongs to no known library."""
        own = [frame for frame in self.frames if frame.is_users]
        return own[-1] if own else None

    def chain(self) -> list[Raised]:
        """This exception and those that it was raised from, the first one first."""
        chained: list[Raised] = []
        raised: Raised | None = self
        while raised is not None and len(chained) < 20:
            chained.insert(0, raised)
            raised = raised.source
        return chained


@dataclass
class _Reader:
    """The state of one rank's output."""

    frames: list[Frame] = field(default_factory=list)
    first_line: int = 0
    is_open: bool = False
    has_header: bool = False
    is_handled: bool = False
    before: str = ""
    """The line before this one."""
    awaits_code: bool = False
    last: Raised | None = None
    link: str = ""
    silent: int = 0
    """Lines since the last frame."""
    native_stack: str = ""
    """`Begin` within a stack of C++, `End` after one."""

    def add(self, match: re.Match[str], line: Line) -> None:
        """Adds a frame, to a new traceback where none is open."""
        if not self.is_open:
            self.open(line, has_header=False)
        self.silent, self.awaits_code = 0, re.match("File.*, line", match[0]) is not None
        if len(self.frames) < _MOST_FRAMES:
            frame = {"line": "", "where": "", **match.groupdict("")}
            where = frame["where"].strip()
            self.frames.append(Frame(frame["path"], int(frame["line"][:9] or 0), where=where))

    def open(self, line: Line, *, has_header: bool) -> None:
        """Begins a traceback."""
        self.is_open, self.has_header, self.frames = True, has_header, []
        self.first_line, self.silent = line.number, 0
        self.is_handled = has_header and _SOFT.search(self.before) is not None


class TracebackReader:
    """Collects exceptions from lines that are fed piece by piece."""

    def __init__(self) -> None:
        self.raised: list[Raised] = []
        self.logged: list[Raised] = []
        """Lines on which a program may report an exception in its own words."""
        self.ignored: set[int] = set()
        """Lines of exceptions that Python printed and ignored."""
        self.latest: deque[Raised] = deque(maxlen=_MOST_LOGGED // 2)
        """The last lines that may be an exception's message alone."""
        self._readers: dict[str, _Reader] = {}

    def feed(self, lines: Iterable[Line]) -> None:
        for line in lines:
            if len(self.raised) < _MOST_RAISED and line.text:
                reader = self._readers.setdefault(line.stream, _Reader())
                if not _is_of_native_stack(line, reader):
                    self._read(line, reader)
                reader.before = line.text[:300]

    def last_of_chains(self) -> list[Raised]:
        """Each exception from which no other one was raised."""
        sources = {id(raised.source) for raised in self.raised}
        return [raised for raised in self.raised if id(raised) not in sources]

    def _read(self, line: Line, reader: _Reader) -> None:
        text = line.text[:4000]
        reader.silent += 1
        if reader.silent > _MOST_SILENT:
            reader.is_open = False
        last = reader.last
        if last and last.last_line + 1 == line.number and _UNFINISHED.search(last.message):
            last.message += f" {text}"
            last.last_line = line.number
        elif _START.search(text) and not (line.indented and '"' in text):
            reader.open(line, has_header=True)
            if text.startswith("Original Traceback"):
                reader.link = "original"
        elif (link := LINES["link"].match(text)) is not None:
            reader.link = link.lastgroup or ""
        elif _CHILD.match(text) and last is not None:
            last.is_report = True
        elif frame := next(filter(None, (form.match(text) for form in _FRAMES)), None):
            reader.add(frame, line)
        elif reader.is_open and (arrow := _ARROW.match(text)) is not None and reader.frames:
            reader.frames[-1].line = int(arrow["line"])
            reader.frames[-1].code = arrow["code"].strip()
        elif (found := _exception(line, text, reader)) is not None:
            self._add(found[0], found[1], line, reader)
        elif reader.awaits_code and reader.frames:
            reader.frames[-1].code = text[:200]
            reader.awaits_code = False
        elif reader.is_open and reader.frames and _MARKERS.match(text):
            reader.frames[-1].marks = text
        else:
            self._keep(line, text, reader)

    def _keep(self, line: Line, text: str, reader: _Reader) -> None:
        """Keeps a line below an exception with it, and one that may report another."""
        last = reader.last
        if last and last.last_line + 1 == line.number and not (line.level or reader.is_open):
            if reader.native_stack == "End":
                last.message, last.last_line = f"{last.message} {text}", line.number
            else:
                last.add_detail(text, line.number)
            reader.native_stack = ""
        elif (logged := _logged(line, text, reader.before)) is not None:
            if not logged.is_logged:
                self.latest.append(logged)
            elif len(self.logged) < _MOST_LOGGED:
                self.logged.append(logged)

    def _add(self, name: str, message: str, line: Line, reader: _Reader) -> None:
        message = message.strip().translate(_PLAIN)
        raised = Raised(name, message, line, reader.frames, reader.first_line, line.number)
        if reader.is_open:
            raised.is_handled = reader.is_handled
        else:
            raised.frames, raised.first_line = [], line.number
        link, last = reader.link, reader.last
        reader.is_open, reader.awaits_code, reader.link, reader.frames = False, False, "", []
        reader.native_stack = ""
        if last is not None and link in ("caused", "during"):
            raised.source, raised.while_handling = last, link == "during"
        elif last is not None and link == "original":
            raised.frames = [*last.frames, *raised.frames]
            raised.first_line = last.first_line
            self.raised.remove(last)
            raised.source, raised.while_handling = last.source, last.while_handling
        if link == "ignored":
            self.ignored.add(line.number)
            return
        reader.last = raised
        self.raised.append(raised)


def _is_of_native_stack(line: Line, reader: _Reader) -> bool:
    """Whether a line is of the stack that torch_xla's C++ prints below its exception, whose message
    goes on after it."""
    last = reader.last
    if last is None:
        return False
    if mark := LINES["native_stack"].match(line.text):
        reader.native_stack, last.last_line = mark["end"], line.number
        return True
    is_within = reader.native_stack == "Begin" and line.indented
    if reader.native_stack == "Begin" and not is_within:
        reader.native_stack = ""  # its end was cut off
    if is_within and (call := LINES["native_call"].match(line.text)):
        last.native_call = last.native_call or call["call"]
    return is_within


def _exception(line: Line, text: str, reader: _Reader) -> tuple[str, str] | None:
    """(class, message) where the line is the end of a traceback, or an exception alone."""
    if line.level in ("W", "I") and not reader.is_open:
        return None
    found = None
    if reader.is_open:
        found = LINES["in_traceback"].match(text)
        if found is None and reader.frames and not line.indented and reader.silent <= _MOST_SOURCE:
            found = LINES["after_frames" if reader.has_header else "alone"].match(text)
    elif not line.indented or _MARKERS.match(reader.before) or _OF_A_MODULE.match(text):
        found = LINES["alone"].match(text)
    if found is not None:
        is_printed = not (line.level == "E" or (reader.has_header and reader.frames))
        quoted = LINES["quoted"].search(found["message"] or "") or found
        is_warning = _WARNING.search(found["name"]) and is_printed
        return None if is_warning else (quoted["name"] or found["name"], quoted["message"] or "")
    if reader.is_open:
        return None
    for pattern, name, levels in _CLASSLESS:
        match = pattern.match(text) if _counts(line, levels) else None
        if match is None or (levels in _SAID and is_quoted(line, match.start("message"))):
            continue
        if levels != "hard" or not _SOFT.search(f"{reader.before} {text}"):
            return _classified(name or match["name"], match["message"])
    return None


def _logged(line: Line, text: str, before: str) -> Raised | None:
    """An exception that a program reports in its own words, unless it goes on without it."""
    is_logged = bool(line.level or _SAYS.search(text))
    is_mild = _SOFT.search(f"{before} {text}") or (not is_logged and LINES["notice"].search(text))
    if line.level in ("W", "I") or is_mild or (line.indented and not LINES["alone"].match(text)):
        return None
    found = LINES["within"].search(text)
    if found is None or is_quoted(line, found.start()):
        found = LINES["field"].search(text)
    name, message = (found["name"], found["message"]) if found else ("", text)
    message = message.translate(_PLAIN)
    class_name, said = _classified(name, message)
    start = len(message) - len(said)
    if (is_logged or not start) and not is_quoted(line._replace(text=message), start):
        name, message = class_name, said
    return Raised(name, message.rstrip("`* "), line, first_line=line.number, is_logged=is_logged)


def _classified(name: str, message: str) -> tuple[str, str]:
    """The class that the wording of a message without one fixes, and the message from there."""
    for form, class_name in _WORDINGS if name in _WITHOUT_CLASS else ():
        if match := form.search(message):
            return class_name, message[match.start() :]
    return name, message


def _counts(line: Line, levels: str) -> bool:
    if levels == "none":
        return not line.level and not line.indented
    return levels in ("any", "hard", "said") or bool(line.level and line.level in levels)
