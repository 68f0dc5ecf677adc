"""`tpukit run -- COMMAND ...`: runs any command and explains why it failed. Imports no torch."""

import json as json_format
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from tpukit.commands.output import DebugOption, JsonOption, Output
from tpukit.commands.reports.explanation import explain_named, explanation_lines, fields_of
from tpukit.errors import ConfigError
from tpukit.io.folders import cache_folder
from tpukit.io.recorder import recording_environment
from tpukit.io.relay import OutputLog, Relay
from tpukit.io.secrets import without_secrets
from tpukit.io.units import format_duration, parse_duration
from tpukit.probe.logs import ExplainedLog
from tpukit.probe.logs.place.live import is_uncaught, read_records

app = typer.Typer()

EXPLAIN_SECONDS = 20.0
"""Time limit of an explanation."""
NOTIFY_SECONDS = 60.0
"""Time limit of the `--notify` command."""
KEPT_LOGS = 20
"""Maximum number of logs in the cache folder."""
BUSY_SECONDS = 1.0
"""Time over which the processes' use of the cores is measured."""
STOPPING = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}


@app.command(context_settings={"allow_interspersed_args": False})
def run_command(
    command: Annotated[
        list[str],
        typer.Argument(metavar="COMMAND...", help="What to run, after `--`: -- python train.py."),
    ],
    silence: Annotated[
        str, typer.Option(metavar="DURATION", help="Warn if the command is silent for this long.")
    ] = "30m",
    log: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File for the output (default: in the cache folder)."),
    ] = None,
    notify: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND", help="Shell command that gets the JSON at the end and at silence."
        ),
    ] = None,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Run any command, keep its output with time stamps, and explain why it failed or hangs.

    Terminal, exit code and signals are the command's own.
    """
    seconds = parse_duration(silence)
    if seconds < 1:
        raise ConfigError(f"--silence: {silence} is less than a second.", "Write 30m or 90s.")
    output = Output(as_json=json)
    recorded = Recorded(command, OutputLog(log or _log_in_cache(command)), notify)
    try:
        relay = Relay(command, recorded.log, recording_environment(recorded.record))
    except OSError as error:
        raise ConfigError(
            f"{command[0]}: cannot be run ({error.strerror}).", "Name a program, as after a prompt."
        ) from None
    code = relay.wait(seconds, lambda silent: recorded.report_silence(relay.process.pid, silent))
    result = recorded.report_end(code, is_stopped=bool(STOPPING & relay.received))
    output.result(result)
    raise typer.Exit(result["exit_code"])


@dataclass
class Recorded:
    """A command and its log, and what is said about them."""

    command: Sequence[str]
    log: OutputLog
    notify: str | None
    started: float = field(default_factory=time.monotonic)
    record: Path = field(default_factory=lambda: _runs_folder() / f"{os.getpid()}.jsonl")
    """What its Python programs record of exceptions that they do not catch."""

    def report_silence(self, process: int, silent: float) -> None:
        """Says that the command may hang, and what its log shows."""
        self.log.note(f"no output for {silent:.0f} s; {_activity(process)}")
        self._report("silent", None, f"has printed nothing for {format_duration(silent)}")

    def report_end(self, code: int, *, is_stopped: bool) -> dict[str, Any]:
        """Says why the command failed; the fields of `--json`."""
        name = signal.Signals(-code).name if code < 0 else None
        if name is not None and not is_stopped:
            self.log.note(f"the command was ended by {name}")
        self.log.close()
        if self.log.lost is not None:
            _say(f"tpukit run: the log {self.log.path} is incomplete: {self.log.lost}.")
        if code == 0:
            return self._report_threads()
        how = f"was ended by {name}" if name else f"ended with exit code {code}"
        event = "stopped" if is_stopped else "killed" if name else "failed"
        return self._report(event, code if code > 0 else 128 - code, how)

    def _report_threads(self) -> dict[str, Any]:
        """Says which threads of a command that succeeded did not: it went on without them."""
        records = [record for record in read_records(self.record) if record.thread]
        if not records:
            return self._result("succeeded", 0)
        log = explain_named(str(self.log.path), EXPLAIN_SECONDS, records=records)
        of_threads = [replace(e, role="cause") for e in log.explanations if is_uncaught(e, records)]
        log = replace(log, explanations=of_threads)
        threads = ", ".join(record.thread for record in records)
        return self._say_all("succeeded", 0, f"ended with exit code 0, but not {threads}", log)

    def _report(self, event: str, code: int | None, what: str) -> dict[str, Any]:
        log = None
        if event != "stopped":
            records = read_records(self.record)
            log = explain_named(str(self.log.path), EXPLAIN_SECONDS, records=records)
        return self._say_all(event, code, what, log)

    def _say_all(
        self, event: str, code: int | None, what: str, log: ExplainedLog | None
    ) -> dict[str, Any]:
        after = format_duration(time.monotonic() - self.started)
        _say(f"tpukit run: {shlex.join(self.command)} {what}, {after} after its start.")
        _say(f"  Output: {self.log.path}")
        for line in explanation_lines(log) if log else ():
            _say(line)
        return self._result(event, code, fields_of(log) if log else {})

    def _result(
        self, event: str, code: int | None, found: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        result = {
            "ok": code == 0, "event": event, "command": list(self.command), "exit_code": code,
            "seconds": round(time.monotonic() - self.started, 3), "log": str(self.log.path),
            "explanations": [], "unknown": [], "lines": None, "notes": [], **(found or {}),
        }  # fmt: skip
        if self.notify:
            _call(self.notify, result)
        if event != "silent":
            self.record.unlink(missing_ok=True)
        return result


def _call(hook: str, result: dict[str, Any]) -> None:
    """Runs the user's shell command with the JSON on its standard input."""
    try:
        done = subprocess.run(
            hook, shell=True, input=json_format.dumps(result).encode(), timeout=NOTIFY_SECONDS,
            stdout=2, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        _say(f"tpukit run: --notify took longer than {NOTIFY_SECONDS:.0f} s and was ended.")
    else:
        if done.returncode:
            _say(f"tpukit run: --notify ended with exit code {done.returncode}.")


def _activity(process: int) -> str:
    """How many processes there are, and how many cores they use."""
    with suppress(psutil.Error):
        first = psutil.Process(process)
        family = [first, *first.children(recursive=True)]
        for member in family:
            member.cpu_percent()  # the next call counts from here
        time.sleep(BUSY_SECONDS)
        busy = sum(member.cpu_percent() for member in family if member.is_running()) / 100
        return f"{len(family)} processes, {busy:.1f} cores busy"
    return "its processes are not visible"


def _runs_folder() -> Path:
    folder = cache_folder() / "runs"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with suppress(OSError):
        folder.chmod(0o700)  # output may hold secrets, and older versions made it for all
    return folder


def _log_in_cache(command: Sequence[str]) -> Path:
    """A new file in the cache folder, of which the oldest logs are removed."""
    folder = _runs_folder()
    with suppress(OSError):
        for old in sorted(folder.glob("*.log"))[: -KEPT_LOGS + 1]:
            old.unlink()
    name = "".join(c if c.isalnum() else "-" for c in Path(command[0]).name)[:40]
    return folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}-{os.getpid()}.log"


def _say(line: str) -> None:
    print(without_secrets(line), file=sys.stderr, flush=True)
