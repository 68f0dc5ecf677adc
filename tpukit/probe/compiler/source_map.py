"""Maps operations to lines of source: a trace's call stacks reduced to the model's own line."""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping
from typing import NamedTuple

FILE = re.compile(r'^(#loc\d+) = loc\("([^"]*)":(\d+):\d+\)$', re.MULTILINE)
NAMED = re.compile(r'^(#loc\d+) = loc\("([^"]*)"\((#loc\d+)\)\)$', re.MULTILINE)
FRAME = re.compile(r'^(#loc\d+) = loc\("[^"]*"\((#loc\d+)\)\)$', re.MULTILINE)
CALL = re.compile(r"^(#loc\d+) = loc\(callsite\((#loc\d+) at (#loc\d+)\)\)$", re.MULTILINE)

FOREIGN = ("/site-packages/", "/dist-packages/", "/tpukit/train/", "/tpukit/hardware/",
           "/tpukit/probe/", "/tpukit/testing.py", "/lib/python3", "<")  # fmt: skip
"""Parts of paths that are not the model: libraries and the engine around it."""


class SourceLine(NamedTuple):
    """A line of source."""

    path: str
    line: int

    @property
    def is_model_code(self) -> bool:
        """Whether it is neither a library's nor the engine's."""
        return not any(part in self.path for part in FOREIGN)


def model_frame(error: BaseException) -> traceback.FrameSummary | None:
    """The model's innermost frame in an error's traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    own = (f for f in reversed(frames) if SourceLine(f.filename, f.lineno or 0).is_model_code)
    return next(own, None)


def resolve_places(module: str) -> str:
    """A StableHLO module's text with each call stack replaced by one place.

    torch_xla records the whole Python stack of each operation; the compiler keeps the innermost
    frame alone, which is a line of torch. The innermost frame of the model's own is kept instead,
    where there is one (a backward pass runs outside all of them).
    """
    files = {match[1]: SourceLine(match[2], int(match[3])) for match in FILE.finditer(module)}
    calls = list(CALL.finditer(module))
    inner = {match[1]: match[2] for match in (*FRAME.finditer(module), *calls)}
    caller = {match[1]: match[3] for match in calls}

    def resolve(match: re.Match[str]) -> str:
        place = _place(match[1], files, inner, caller)
        return f'{match[1]} = loc("{place.path}":{place.line}:0)' if place else match[0]

    return CALL.sub(resolve, module)


def located_operations(module: str) -> list[tuple[str, str | None]]:
    """Each operation of a StableHLO module's text, and where it is one of the model's lines:
    `aten::view, at model.py:12`."""
    text = resolve_places(module)
    files = {match[1]: SourceLine(match[2], int(match[3])) for match in FILE.finditer(text)}
    named = {match[1]: (match[2], match[3]) for match in NAMED.finditer(text)}

    def place(at: str) -> str | None:
        operator = ""
        while at in named:
            name, at = named[at]
            operator = operator or name.rpartition("/")[2].replace("__", "::")
        line = files.get(at)
        return f"{operator}, at {line.path}:{line.line}" if line and line.is_model_code else None

    lines = (line.rpartition(" loc(") for line in text.splitlines() if not line.startswith("#"))
    return [(operation, place(at.rstrip(")"))) for operation, _, at in lines if "=" in operation]


def _place(
    name: str, files: Mapping[str, SourceLine], inner: Mapping[str, str], caller: Mapping[str, str]
) -> SourceLine | None:
    """The model's innermost frame of a call stack, else the innermost of all."""
    innermost: SourceLine | None = None
    call: str | None = name
    while call is not None:
        frame = inner[call] if call in caller else call
        while frame in inner:
            frame = inner[frame]
        place = files.get(frame)
        if place and place.is_model_code:
            return place
        innermost = innermost or place
        call = caller.get(call)
    return innermost
