"""Reads the records of uncaught exceptions that `tpukit.io.recorder` writes."""

import json
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tpukit.io.recorder import RECORD_VARIABLE
from tpukit.io.recorder.record import chain_of
from tpukit.probe.logs.explanations import Explanation
from tpukit.probe.logs.tracebacks import Raised


@dataclass(frozen=True)
class Uncaught:
    """One uncaught exception, with what it was raised from."""

    thread: str
    """The thread's name; empty for the main one."""
    path: Sequence[str]
    """The program's `sys.path`."""
    chain: Sequence[dict[str, Any]]


def read_records(file: Path) -> list[Uncaught]:
    """The records of a file, which another program wrote: other lines are left out."""
    found = []
    with suppress(OSError):
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError, TypeError):
                found.append(Uncaught(**json.loads(line)))
    return found


def given_records() -> list[Uncaught]:
    """The records of the file that a notebook's command names."""
    file = os.environ.get(RECORD_VARIABLE)
    return read_records(Path(file)) if file else []


def record_of(error: BaseException) -> Uncaught:
    """The record of an exception of this process."""
    return Uncaught("", sys.path, list(chain_of(error)))


def text_of(error: BaseException) -> str:
    """The traceback as Python prints it."""
    return "".join(traceback.format_exception(error))


def with_values(raised: Raised, records: Sequence[Uncaught]) -> tuple[Raised, Sequence[str]]:
    """The exception with the values of its record, and that program's path, if there is one."""
    places = {(frame.path, frame.line) for frame in raised.frames}
    for record in records:
        frames = [frame for error in record.chain for frame in error["frames"]]
        by_place = {(frame["file"], frame["line"]): frame for frame in frames}
        if not places & set(by_place) or not any(_is_of(raised, e) for e in record.chain):
            continue
        valued = []
        for frame in raised.frames:
            of_record = by_place.get((frame.path, frame.line), {})
            valued.append(
                replace(frame, names=of_record.get("names", {}), module=of_record.get("module", ""))
            )
        return replace(raised, frames=valued), record.path
    return raised, ()


def is_uncaught(explanation: Explanation, records: Sequence[Uncaught]) -> bool:
    """Whether an explanation is of one of the recorded exceptions."""
    raised = explanation.raised
    return raised is not None and bool(with_values(raised, records)[1])


def _is_of(raised: Raised, error: dict[str, Any]) -> bool:
    """Whether a record's exception is this one, or carries its text: a worker's, which was raised
    again."""
    said = " ".join(error["message"].split())
    mine = " ".join(raised.message.split())[:60]
    return error["class"] == raised.class_name and (mine in said or not mine)
