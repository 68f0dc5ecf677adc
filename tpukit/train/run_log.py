"""The logs of a run: metrics and events as JSON lines, TensorBoard, text, the loss curve."""

import faulthandler
import io
import json
import os
import platform
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from tpukit.hardware.launch.failures import is_lost_connection
from tpukit.hardware.memory import is_out_of_memory
from tpukit.io.files import write_file
from tpukit.io.json_lines import NewLines, json_rows
from tpukit.io.secrets import without_secrets
from tpukit.train.run_folder import RunFolder
from tpukit.train.user_code import task_failure

WARNING = "Warning: "


class RunLog:
    """The logs of rank 0. `log` prints a line for people; it is kept in `log.txt` too."""

    def __init__(self, folder: RunFolder, log: Callable[[str], None], tracker: Any = None) -> None:
        """tracker: another library's run; see `start_tracker`."""
        self.folder = folder
        self._tracker = tracker
        self._log = log
        self._text: IO[str] = folder.log.open("a", encoding="utf-8")
        self._metrics: IO[str] = folder.metrics.open("a", encoding="utf-8")
        self._events: IO[str] = folder.events.open("a", encoding="utf-8")
        self._board: EventFile | None = None

    def text(self, message: str) -> None:
        """A line for people, kept in log.txt with its time."""
        self.show(message)
        self.note(message)

    def show(self, message: str) -> None:
        """A line for people that log.txt has already."""
        self._log(message)

    def note(self, message: str) -> None:
        """A line for log.txt alone; a warning is an event too."""
        self._text.write(f"{_now()} {without_secrets(message)}\n")
        self._text.flush()
        if message.startswith(WARNING):
            self.event("warning", text=message.removeprefix(WARNING))

    def event(self, kind: str, **values: Any) -> None:
        """One JSON object in events.jsonl: a session's start or end, a failure, a warning."""
        values = {n: without_secrets(v) if isinstance(v, str) else v for n, v in values.items()}
        self._events.write(json.dumps({"time": _now(), "kind": kind, **values}) + "\n")
        self._events.flush()

    def end(self, text: str, step: int, *, shown: bool = True) -> None:
        """What a session ended with after `step`."""
        (self.text if shown else self.note)(text)
        self.event("end", step=step, text=text)

    def note_failure(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Keeps what ended a run; as `ExitStack.push` calls it."""
        if error is not None:
            text = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            self.note(f"Failed: {text}")
            self.event("failure", text=text)

    def metric_line(self, values: Mapping[str, Any]) -> None:
        """One JSON object in metrics.jsonl, its numbers in TensorBoard's event file too."""
        self._metrics.write(json.dumps(values, allow_nan=True) + "\n")
        self._metrics.flush()
        step = int(values["step"])
        if self._board is None:
            self._board = EventFile(self.folder.path, step)
        numbers = {n: v for n, v in values.items() if isinstance(v, int | float) and n != "step"}
        self._board.scalars(step, numbers)
        if self._tracker is not None:
            self._track(lambda: self._tracker.log(numbers, step=step))

    def _track(self, send: Callable[[], object]) -> None:
        """What a tracker raises is one warning, and training goes on without it."""
        try:
            send()
        except Exception as error:
            self._tracker = None
            first = (str(error).splitlines() or [""])[0]
            self.text(f"Warning: the tracker failed: {type(error).__name__}: {first}")

    def close(self) -> None:
        """Closes the files."""
        if self._tracker is not None:
            self._track(self._tracker.finish)
        for file in (self._text, self._metrics, self._events, self._board):
            if file is not None:
                file.close()


def _now() -> str:
    return datetime.now().isoformat(timespec="seconds")


def metric_rows(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Lines of metrics.jsonl; one cut short by a kill, or damaged, is left out."""
    for row in json_rows(lines):
        if isinstance(row.get("step"), int) and "kind" in row:
            yield row


def read_metrics(folder: RunFolder) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl."""
    return list(metric_rows(NewLines(folder.metrics)))


def cut_metrics(folder: RunFolder, step: int) -> None:
    """Drops the lines after `step`: a resumed run writes them again."""
    kept = [row for row in read_metrics(folder) if row["step"] <= step]
    text = "".join(json.dumps(row, allow_nan=True) + "\n" for row in kept)
    write_file(folder.metrics, text.encode())


def draw_loss_curve(folder: RunFolder) -> Path | None:
    """`loss.png` from metrics.jsonl; None where there is too little to draw."""
    picture, path = loss_curve(folder), folder.path / "loss.png"
    if picture is None:
        return None
    write_file(path, picture)
    return path


def loss_curve(folder: RunFolder) -> bytes | None:
    """Training and validation loss from metrics.jsonl as a PNG picture."""
    rows = read_metrics(folder)
    train = [(r["step"], r["loss"]) for r in rows if r["kind"] == "train"]
    name = next((k for r in rows for k in r if re.fullmatch(r"valid_(\S+_)?loss", k)), "")
    valid = [(r["step"], r[name]) for r in rows if name in r]
    if len(train) < 2:
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(*zip(*train, strict=True), color="tab:blue", linewidth=1, label="training")
    if valid:
        axes.plot(
            *zip(*valid, strict=True), color="tab:orange", marker="o", ms=3, label="validation"
        )
    if all(loss > 0 for _, loss in train + valid):
        axes.set_yscale("log")
    axes.set(xlabel="optimizer step", ylabel="loss", title=_title(folder))
    _set_ticks(axes, [loss for _, loss in train + valid])
    axes.grid(alpha=0.3)
    axes.legend()
    picture = io.BytesIO()
    figure.savefig(picture, dpi=120, format="png")
    return picture.getvalue()


def _title(folder: RunFolder) -> str:
    """The run's name; nothing where the font lacks its characters (Chinese, say)."""
    from matplotlib import font_manager

    name = folder.path.resolve().name
    font = font_manager.get_font(font_manager.findfont("DejaVu Sans"))
    return name if all(font.get_char_index(ord(letter)) for letter in name) else ""


def _set_ticks(axes: Any, losses: list[float]) -> None:
    """Whole steps, and losses as plain numbers: a logarithmic axis names powers of ten alone."""
    from matplotlib import ticker

    axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    if axes.get_yscale() == "log":
        spans_decade = max(losses) > 10 * min(losses)
        steps = ticker.LogLocator(subs=(1, 2, 5)) if spans_decade else ticker.MaxNLocator(6)
        axes.yaxis.set_major_locator(steps)
        axes.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(ticker.NullFormatter())


@contextmanager
def task_failures_kept(folder: RunFolder, rank: int) -> Iterator[None]:
    """Turns what a user's code raises into a TaskFailedError, its traceback in this rank's log.

    Running out of memory and the end of another rank stay what they are.
    """
    try:
        yield
    except Exception as error:
        is_hardwares = is_out_of_memory(error, limited=True) or is_lost_connection(error)
        failure = None if is_hardwares else task_failure(error)
        if failure is None:
            raise
        if folder.config.exists():
            failure.traceback_file = folder.log if rank == 0 else folder.rank_log(rank)
            with failure.traceback_file.open("a", encoding="utf-8") as file:
                file.write("\n".join([failure.message, *failure.__notes__]))
        raise failure from error


def keep_crashes(folder: RunFolder, rank: int) -> None:
    """Begins this rank's log file; a crash in compiled code leaves its stack there."""
    path = folder.rank_log(rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    # It stays open as long as the process.
    file = path.open("a", encoding="utf-8")
    file.write(f"{datetime.now().isoformat(timespec='seconds')} process {os.getpid()} began\n")
    file.flush()
    faulthandler.enable(file)


# -- TensorBoard ---------------------------------------------------------------------------------
VERSION = "brain.Event:2"


class EventFile:
    """A new file in `folder`; what earlier files hold from step `first_step` on is superseded."""

    def __init__(self, folder: Path, first_step: int) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event: Any = event_pb2.Event
        self._summary: Any = summary_pb2.Summary
        name = f"events.out.tfevents.{time.time():.6f}.{platform.node()}.{os.getpid()}"
        self._records = RecordWriter((folder / name).open("ab"))
        self._write(file_version=VERSION)
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._write(step=first_step, session_log=start)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Adds the values of a step, and flushes them."""
        value = self._summary.Value
        parts = [value(tag=tag, simple_value=number) for tag, number in values.items()]
        self._write(step=step, summary=self._summary(value=parts))
        self._records.flush()

    def close(self) -> None:
        self._records.close()

    def _write(self, **fields: Any) -> None:
        event = self._event(wall_time=time.time(), **fields)
        self._records.write(event.SerializeToString())
