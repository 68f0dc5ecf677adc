"""What a run tells: JSON lines, TensorBoard events, text, a progress line, the loss curve."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from tpukit.train.run_folder import RunFolder

PLAIN_LINE_SECONDS = 10.0
"""Longest silence where there is no terminal (a notebook)."""
NEWS_SECONDS = 2.0
"""Shortest pause there, when new figures were read."""
LIVE_SECONDS = 0.2


class RunLog:
    """The main process' logs. Text goes to people (`tell`) and to `log.txt`."""

    def __init__(self, folder: RunFolder, tell: Callable[[str], None]) -> None:
        self.folder = folder
        self._tell = tell
        self._text: IO[str] = folder.log.open("a", encoding="utf-8")
        self._metrics: IO[str] = folder.metrics.open("a", encoding="utf-8")
        self._events: Any = None

    def text(self, message: str) -> None:
        """A line for people, kept in log.txt with its time."""
        self._tell(message)
        self.note(message)

    def note(self, message: str) -> None:
        """A line for log.txt alone."""
        self._text.write(f"{datetime.now().isoformat(timespec='seconds')} {message}\n")
        self._text.flush()

    def metric_line(self, values: Mapping[str, Any]) -> None:
        """One JSON object in metrics.jsonl, its numbers in TensorBoard's event file too."""
        self._metrics.write(json.dumps(values, allow_nan=True) + "\n")
        self._metrics.flush()
        step = int(values["step"])
        for name, value in values.items():
            if isinstance(value, int | float) and name != "step":
                self._writer(step).add_scalar(name, value, step)
        self._writer(step).flush()

    def _writer(self, step: int) -> Any:
        if self._events is None:
            from torch.utils.tensorboard import SummaryWriter

            self._events = SummaryWriter(self.folder.path, purge_step=step)  # type: ignore[no-untyped-call]
        return self._events

    def close(self) -> None:
        """Closes the files."""
        self._text.close()
        self._metrics.close()
        if self._events is not None:
            self._events.close()


def read_metrics(folder: RunFolder) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; one cut short by a kill is left out."""
    rows = []
    if folder.metrics.exists():
        for line in folder.metrics.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return rows


def cut_metrics(folder: RunFolder, step: int) -> None:
    """Drops the lines after `step`: a resumed run writes them again."""
    from tpukit.train.checkpoint import write_whole

    kept = [row for row in read_metrics(folder) if row["step"] <= step]
    text = "".join(json.dumps(row, allow_nan=True) + "\n" for row in kept)
    write_whole(folder.metrics, text.encode())


def draw_loss_curve(folder: RunFolder) -> Path | None:
    """`loss.png` from metrics.jsonl: training and validation loss, rate below."""
    rows = read_metrics(folder)
    train = [(r["step"], r["loss"]) for r in rows if r["kind"] == "train"]
    valid = [(r["step"], r["valid_loss"]) for r in rows if "valid_loss" in r]
    if len(train) < 2:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(*zip(*train, strict=True), color="tab:blue", linewidth=1, label="training")
    if valid:
        axes.plot(
            *zip(*valid, strict=True), color="tab:orange", marker="o", ms=3, label="validation"
        )
    if all(loss > 0 for _, loss in train + valid):
        axes.set_yscale("log")
    axes.set(xlabel="optimizer step", ylabel="loss", title=folder.path.name)
    axes.grid(alpha=0.3)
    axes.legend()
    path = folder.path / "loss.png"
    figure.savefig(path, dpi=120)
    return path


# -- progress --------------------------------------------------------------------------------------
class Progress:
    """A line that says how far a run is: live on a terminal, every few seconds elsewhere."""

    def __init__(self, total: int, done: int, unit: str, stream: IO[str] | None = None) -> None:
        self.total = total
        self.first = done
        self.unit = unit
        self.stream = stream or sys.stderr
        self.started = time.monotonic()
        self._last_line = self.started
        self._live: Any = None

    def __enter__(self) -> Progress:
        if self.stream.isatty():
            self._live = _rich_progress(self.stream)
            self._live.start()
            self._task = self._live.add_task("", total=self.total, completed=self.first)
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, done: int, facts: Callable[[], str], *, at_once: bool = False) -> None:
        """`done` of the total; `facts` gives the figures beside it and is called when they show."""
        now = time.monotonic()
        pause = NEWS_SECONDS if at_once else PLAIN_LINE_SECONDS
        if self._live is not None:
            pause = LIVE_SECONDS
        if done < self.total and now - self._last_line < pause:
            return
        self._last_line = now
        if self._live is not None:
            self._live.update(self._task, completed=done, description=facts())
        else:
            line = f"{self.unit} {done}/{self.total}  {facts()}  left {self.time_left(done)}"
            print(line, file=self.stream, flush=True)

    def time_left(self, done: int) -> str:
        """From the mean rate of this session."""
        if done <= self.first:
            return "?"
        seconds = (time.monotonic() - self.started) / (done - self.first) * (self.total - done)
        return format_duration(seconds)


def _rich_progress(stream: IO[str]) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    return RichProgress(
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
        console=Console(file=stream),
        transient=False,
    )


def format_duration(seconds: float) -> str:
    """`8h05m`, `3m20s`, `12s`."""
    whole = int(seconds)
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 60}m{whole % 60:02d}s" if whole >= 60 else f"{whole}s"


def format_bytes(count: float) -> str:
    """`1.8 GB` (10^9)."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def keep_crashes(folder: RunFolder, process: int) -> None:
    """Begins this process' rank log; a crash in compiled code leaves its stack there."""
    path = folder.rank_log(process)
    path.parent.mkdir(parents=True, exist_ok=True)
    # It stays open as long as the process.
    file = path.open("a", encoding="utf-8")
    file.write(f"{datetime.now().isoformat(timespec='seconds')} process {os.getpid()} began\n")
    file.flush()
    faulthandler.enable(file)


def keep_rank_output(folder: RunFolder, process: int) -> None:
    """From now on this process' own output goes to its rank log, not to the user's screen."""
    path = folder.rank_log(process)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
