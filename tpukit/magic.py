"""`%tpukit train ...` in a notebook: a command as a child process, its pictures below its lines."""

import codecs
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from tpukit.commands.output import RESULT_VARIABLE
from tpukit.commands.reports.inline import notebook_display, show_result
from tpukit.errors import TpukitError
from tpukit.io.interrupts import handling
from tpukit.io.notebook import FOLLOWER_VARIABLE
from tpukit.io.recorder import RECORD_VARIABLE
from tpukit.io.recorder.record import append_record

KILLING_PRESS = 3
"""The press of the stop button that ends a command without waiting for its checkpoint."""
ERROR_LINES = ("Error: ", "Usage: ")
"""How the lines begin with which a command ends when it fails."""
RECORD = "exception.jsonl"
WITHIN_ERROR = (" ", "\n", "Try ")
"""How the lines that may follow these begin."""


class CommandFailedError(TpukitError):
    """A command of a cell ended with another exit code than 0."""

    default_id = "command-failed"

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of a traceback."""
        return str(self).splitlines()


def load_ipython_extension(shell: Any) -> None:
    """Called by `%load_ext tpukit`."""
    shell.register_magic_function(run_line, "line", "tpukit")


def run_line(line: str) -> None:
    """Runs a command line, prints its lines, and shows its result.

    The stop button lets the command save a checkpoint first; the third press kills it.

    Raises CommandFailedError where the command fails or is interrupted.
    """
    with tempfile.TemporaryDirectory(prefix="tpukit-cell-") as folder:
        result, display = Path(folder, "result.json"), notebook_display()
        is_foreign = line.split()[:1] == ["run"]
        failed = _last_exception(Path(folder)) if line.split()[-2:] == ["--explain", "-"] else None
        process = _start(line, result if display and not is_foreign else None, failed)
        with process, _interrupts_passed_on(process):
            error = _print_all(process) if is_foreign else _print_lines(process.stdout or ())
        if result.is_file() and not line.startswith("data "):  # its lines say everything
            show_result(display, json.loads(result.read_text(encoding="utf-8")))
    if process.returncode:
        raise CommandFailedError(_failure(error) or _ended(process.returncode))
    print(*error, sep="", end="")


def _last_exception(folder: Path) -> Path | None:
    """The traceback of the last cell that failed, beside the record of its values."""
    error = getattr(sys, "last_value", None)
    if error is None:
        return None
    append_record(str(folder / RECORD), error)
    failed = folder / "traceback.txt"
    failed.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
    return failed


def _start(line: str, result: Path | None, given: Path | None = None) -> subprocess.Popen[str]:
    """The command; with `result` it leaves out what that file's tables show, with `given` it reads
    that file as its standard input."""
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise CommandFailedError(f"Error: %tpukit {line}: {error}.") from error
    return subprocess.Popen(
        [sys.executable, "-m", "tpukit", *words],
        env={**os.environ, **({RESULT_VARIABLE: str(result)} if result else {}),
             "PYTHONIOENCODING": "utf-8",
             # A training saves and ends when the kernel has ended.
             FOLLOWER_VARIABLE: str(os.getpid()),
             **({RECORD_VARIABLE: str(given.with_name(RECORD))} if given else {})},
        stdin=given.open() if given else subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        encoding="utf-8", errors="replace",
        # The kernel's interrupt goes to its whole process group, and to this one through us.
        start_new_session=True,
    )  # fmt: skip


def _print_lines(lines: Iterable[str]) -> list[str]:
    """Prints the lines as they come, but for those of an error at the end, which it returns."""
    error: list[str] = []
    for line in lines:
        if error and not line.startswith((*ERROR_LINES, *WITHIN_ERROR)):
            print(*error, sep="", end="")  # of a user's, and the command goes on
            error = []
        if error or line.startswith(ERROR_LINES):
            error.append(line)
        else:
            print(line, end="", flush=True)
    return error


def _print_all(process: subprocess.Popen[str]) -> list[str]:
    """Prints another program's output as it comes, its progress bars as they are."""
    assert process.stdout is not None
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    while piece := os.read(process.stdout.fileno(), 1 << 16):
        print(decoder.decode(piece), end="", flush=True)
    return []


def _failure(error: Sequence[str]) -> str:
    """The error first, then its hint; without the usage, which --help shows."""
    lines = [line.rstrip() for line in error if line.strip() and not line.startswith("Usage: ")]
    return "\n".join(sorted(lines, key=lambda line: not line.startswith("Error: ")))


def _ended(code: int) -> str:
    if code in (128 + signal.SIGINT, 128 + signal.SIGTERM):
        return "Interrupted. The same cell goes on where it can."
    return f"The command ended with exit code {code}."


@contextmanager
def _interrupts_passed_on(process: subprocess.Popen[str]) -> Iterator[None]:
    """Passes the stop button's interrupts to the process."""
    presses = 0

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal presses
        presses += 1
        if presses == 1:
            print("Interrupted: waiting for the command to end.", flush=True)
        process.send_signal(signal.SIGINT if presses < KILLING_PRESS else signal.SIGKILL)

    with handling(pass_on, [signal.SIGINT]):
        yield
