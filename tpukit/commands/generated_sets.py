"""`tpukit data dialogues` and `tpukit data images`: generated data sets."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from tpukit.commands.output import DebugOption, JsonOption, Output
from tpukit.errors import ConfigError, InterruptedRunError
from tpukit.io.interrupts import StopRequest, listening
from tpukit.io.ranges import LARGEST_BATCH, SEED, Range, range_problems

if TYPE_CHECKING:
    from tpukit.io.progress import Progress

MARKS = {
    "eit": (".simulation", "mean.pth"),
    "dialogues": ("test_references.csv",),
    "images": ("test_labels.csv", "train/*/000000.png"),
}
"""Kind of a generated set -> file or folder that only such a set has."""


def dialogues(
    out: Annotated[
        Path, typer.Option(help="Folder for train.csv, test.csv, test_references.csv.")
    ] = Path("data"),
    n: Annotated[int, typer.Option(help="Rows; a tenth (at most 5000) for testing.")] = 20_000,
    seed: Annotated[int, typer.Option(help="Seed; a row depends on it and its index.")] = 0,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Generate dialogues and their summaries; the test part's names and topics are its own."""
    import dataclasses

    from tpukit.tasks.summarize.data.dialogues import write_dialogues

    ranges = {"n": Range(2, LARGEST_BATCH), "seed": SEED}
    if problems := range_problems({"n": n, "seed": seed}, ranges):
        raise ConfigError(" ".join(problems), "At least one dialogue to train, one to test.")
    output = Output(as_json=as_json)
    with _drawing(n, "dialogues", out) as progress:
        written = write_dialogues(out, n, seed, progress.advance)
    output.text(f"{written.train_rows:,} rows in {written.train}")
    output.text(f"{written.test_rows:,} rows in {written.test}, their summaries beside it")
    output.text(
        f"Train on them: tpukit summarize-train --preset quick --data-path {quote(str(out))}"
    )
    output.result({name: str(v) if isinstance(v, Path) else v
                   for name, v in dataclasses.asdict(written).items()})  # fmt: skip


def images(
    out: Annotated[
        Path, typer.Option(help="Folder for train/CLASS/, valid/CLASS/, test/, test.csv.")
    ] = Path("data"),
    n: Annotated[int, typer.Option(help="Images: 80 % train, 10 % valid, 10 % test.")] = 4000,
    seed: Annotated[int, typer.Option(help="Seed; an image depends on it and its index.")] = 0,
    side: Annotated[int, typer.Option(help="Height and width.")] = 64,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Generate images of eight shapes, to classify."""
    import dataclasses

    from tpukit.tasks.images.data.shapes import CLASSES, write_shapes

    ranges = {"n": Range(10 * len(CLASSES), LARGEST_BATCH), "seed": SEED, "side": Range(16, 1024)}
    if problems := range_problems({"n": n, "seed": seed, "side": side}, ranges):
        raise ConfigError(
            " ".join(problems), f"A set has at least {10 * len(CLASSES)} images, ten a class."
        )
    output = Output(as_json=as_json)
    with _drawing(n, "images", out) as progress:
        written = write_shapes(out, n, seed, side, progress.advance)
    output.text(
        f"{written.train:,} training, {written.valid:,} validation and {written.test:,} test"
        f" images of {written.classes} classes in {out}"
    )
    way = "tpukit train --task images --preset quick --data-path"
    output.text(f"Train on them: {way} {quote(str(out))}")
    output.result({**dataclasses.asdict(written), "path": str(out)})


def refuse_mixing(out: Path, kind: str) -> None:
    """Raises ConfigError where `out` holds a generated set of another kind."""
    for other, marks in MARKS.items():
        if other != kind and any(next(out.glob(mark), None) for mark in marks):
            raise ConfigError(
                f"--out {out} holds a set of `data {other}`: {kind} would mix with it.",
                f"Name another folder: --out {quote(f'{out}-{kind}')}",
            )


@contextmanager
def stoppable(said: Callable[[], str], way_on: str) -> Iterator[None]:
    """Turns a signal within into the error that says what is there and how to go on."""
    stop = StopRequest()
    stop.raises = True
    with listening(stop):
        try:
            yield
        except KeyboardInterrupt:
            number = stop.signal_number or signal.SIGINT
            raise InterruptedRunError(said(), way_on, signal_number=number) from None


@contextmanager
def _drawing(n: int, what: str, out: Path) -> Iterator[Progress]:
    """Shows the progress of a generator; its interruption is said with what to do."""
    from tpukit.io.progress import Progress

    refuse_mixing(out, what)
    progress = Progress("drawing", n)
    with (
        stoppable(
            lambda: f"Stopped with {progress.done:,} of {n:,} {what} in {out}.",
            "The same command draws them anew, the same ones.",
        ),
        progress,
    ):
        yield progress
