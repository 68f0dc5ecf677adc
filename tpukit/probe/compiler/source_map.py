"""Maps operations to lines of source: a trace's call stacks reduced to the model's own line."""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping
from typing import NamedTuple

FILE = re.compile(r'^(#loc\d+) = loc\("([^"]*)":(\d+):\d+\)$')
FRAME = re.compile(r'^(#loc\d+) = loc\("[^"]*"\((#loc\d+)\)\)$')
CALL = re.compile(r"^(#loc\d+) = loc\(callsite\((#loc\d+) at (#loc\d+)\)\)$")

FOREIGN = ("/site-packages/", "/dist-packages/", "/tpukit/train/", "/tpukit/hardware/",
           "/tpukit/probe/", "/lib/python3", "<")  # fmt: skip
"""Parts of paths that are not the model: libraries and the engine around it."""


class Place(NamedTuple):
    """A line of source."""

    path: str
    line: int

    @property
    def is_the_models(self) -> bool:
        """Whether it is neither a library's nor the engine's."""
        return not any(part in self.path for part in FOREIGN)


def model_frame(error: BaseException) -> traceback.FrameSummary | None:
    """The model's innermost frame in an error's traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    own = (f for f in reversed(frames) if Place(f.filename, f.lineno or 0).is_the_models)
    return next(own, None)


def resolve_places(module: str) -> str:
    """A StableHLO module's text with each call stack replaced by one place.

    torch_xla records the whole Python stack of each operation; the compiler keeps the innermost
    frame alone, which is a line of torch. The innermost frame of the model's own is kept instead,
    where there is one (a backward pass runs outside all of them).
    """
    lines = module.splitlines()
    files, inner, outer = _definitions(lines)
    resolved = []
    for line in lines:
        match = CALL.match(line)
        place = _place(match[1], files, inner, outer) if match else None
        resolved.append(
            f'{match[1]} = loc("{place.path}":{place.line}:0)' if match and place else line
        )
    return "\n".join(resolved)


def _definitions(
    lines: list[str],
) -> tuple[dict[str, Place], dict[str, str], dict[str, str]]:
    """Files by name; each frame's file or each call's inner frame; each call's caller."""
    files: dict[str, Place] = {}
    inner: dict[str, str] = {}
    outer: dict[str, str] = {}
    for line in lines:
        if match := FILE.match(line):
            files[match[1]] = Place(match[2], int(match[3]))
        elif match := FRAME.match(line):
            inner[match[1]] = match[2]
        elif match := CALL.match(line):
            inner[match[1]], outer[match[1]] = match[2], match[3]
    return files, inner, outer


def _place(
    name: str, files: Mapping[str, Place], inner: Mapping[str, str], outer: Mapping[str, str]
) -> Place | None:
    """The model's innermost frame of a call stack, else the innermost of all."""
    innermost: Place | None = None
    at: str | None = name
    while at is not None:
        frame = inner[at] if at in outer else at
        while frame in inner:
            frame = inner[frame]
        place = files.get(frame)
        if place and place.is_the_models:
            return place
        innermost = innermost or place
        at = outer.get(at)
    return innermost
