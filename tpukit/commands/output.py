"""Standard output as a contract: people's text, or one JSON object and nothing else."""

import json
import math
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from tpukit.io.files import write_file
from tpukit.io.secrets import without_secrets

RESULT_VARIABLE = "TPUKIT_RESULT"
"""Variable with the file for the JSON object, which a notebook's `%tpukit` shows as tables."""
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object and nothing else on standard output.")
]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def shown_in_cell() -> bool:
    """Whether a notebook's cell shows this command's result as tables and pictures."""
    return RESULT_VARIABLE in os.environ


def plain(value: Any) -> Any:
    """A task's JSON fields: single numbers of numpy and torch as Python's, None for one that is not
    finite."""
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if getattr(value, "ndim", None) == 0:
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Output:
    """Standard output of a command.

    With `as_json`, standard output is kept for the one object: whatever else is printed there
    (libraries' banners, people's text) goes to standard error from now on.
    """

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self._stdout = reserve_stdout() if as_json else None

    def text(self, message: str = "") -> None:
        """A line for people."""
        print(without_secrets(message), file=sys.stderr if self.as_json else sys.stdout, flush=True)

    def result(self, fields: Mapping[str, Any]) -> None:
        """The JSON object; nothing without `--json`."""
        if self._stdout is not None:
            os.write(
                self._stdout, (json.dumps(fields, default=str, allow_nan=False) + "\n").encode()
            )
        if file := os.environ.get(RESULT_VARIABLE):
            with suppress(OSError):  # the cell may have ended
                write_file(Path(file), json.dumps(fields, default=str).encode(), sync=False)

    def hand_over(self) -> None:
        """Gives standard output back: child processes are going to write to it."""
        if self._stdout is not None:
            os.dup2(self._stdout, 1)


_reserved: int | None = None


def reserve_stdout() -> int:
    """A descriptor of the real standard output, after pointing descriptor 1 at standard error."""
    global _reserved  # noqa: PLW0603 - descriptors are per process, and so is this
    if _reserved is None:
        sys.stdout.flush()
        _reserved = os.dup(1)
        os.dup2(2, 1)
    return _reserved


def json_error(message: str, hint: str | None, error_id: str) -> str:
    """The line with the one JSON object of a failure."""
    hint = hint and without_secrets(hint)
    body = {"error": {"message": without_secrets(message), "hint": hint, "id": error_id}}
    return json.dumps(body) + "\n"


def write_json_error(line: str) -> None:
    """Writes it where standard output is kept for it."""
    os.write(reserve_stdout(), line.encode())
