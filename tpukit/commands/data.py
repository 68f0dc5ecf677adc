"""`tpukit data NAME`: generates a synthetic data set that a task declares."""

import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from tpukit.commands.options.option_sets import Given, OwnOptions, with_option_sets
from tpukit.commands.options.own_options import as_parameter, value_of
from tpukit.commands.output import DebugOption, JsonOption, Output
from tpukit.errors import ConfigError, InterruptedRunError
from tpukit.io.interrupts import StopRequest, listening
from tpukit.io.mirror import output_here, send_output
from tpukit.io.remote import address_of
from tpukit.registry.declared import ClassSource, find_source, registered
from tpukit.train.config import build


def make_app(arguments: Sequence[str]) -> typer.Typer:
    """A subcommand for each generator of the installed tasks and of `--task`."""
    app = typer.Typer(no_args_is_help=True)
    app.callback()(data)
    named = value_of("--task", arguments)
    for name, source in generators([*registered(), *([named] if named else [])]).items():
        own = [as_parameter(field, None) for field in source.fields()]
        command = with_option_sets(_command(name, source), own)
        app.command(name, help=source.doc)(command)
    return app


def data() -> None:
    """Generate synthetic data sets."""


def generators(tasks: Sequence[str]) -> dict[str, ClassSource]:
    """The generators of these tasks by name, read from their source."""
    found: dict[str, ClassSource] = {}
    for task in tasks:
        source = find_source(task)
        declared = source.member("generators") if source else None
        if isinstance(declared, Mapping):
            found |= {n: s for n, s in declared.items() if isinstance(s, ClassSource)}
    return found


def _command(name: str, source: ClassSource) -> Callable[..., None]:
    def generate(
        own: OwnOptions,
        out: Annotated[Path, typer.Option(help="Folder of the set.")] = Path("data"),
        task: Annotated[
            str | None, typer.Option("--task", help="my_file.py:MyTask, whose set it is.")
        ] = None,
        as_json: JsonOption = False,
        debug: DebugOption = False,
    ) -> None:
        output = Output(as_json=as_json)
        generator = build(source.load(), own)
        here = output_here(out) or out
        refuse_mixing(here, name, [*registered(), *([task] if task else [])])
        fields = _written(generator, name, here, output)
        send_output(out)
        output.result({**fields, "path": address_of(out) or str(out)})

    return generate


def _written(generator: Any, name: str, out: Path, output: Output) -> Given:
    """The JSON fields of a generator that has written its set."""
    from tpukit.io.progress import Progress

    progress = Progress("generating", generator.n)
    with _stoppable(progress, name, out), progress:
        fields = dict(generator.write(out, progress, output.text))
    return {"path": str(out), **fields}


def refuse_mixing(out: Path, name: str, tasks: Sequence[str]) -> None:
    """Raises ConfigError where `out` holds a generated set of another kind."""
    for other, source in generators(tasks).items():
        marks = source.member("marks") or ()
        if other != name and any(next(out.glob(mark), None) for mark in marks):
            raise ConfigError(
                f"--out {out} holds a set of `data {other}`: {name} would mix with it.",
                f"Name another folder: --out {shlex.quote(f'{out}-{name}')}",
            )


@contextmanager
def _stoppable(progress: Any, name: str, out: Path) -> Iterator[None]:
    """Turns a signal within into the error that says what is there and how to go on."""
    stop = StopRequest()
    stop.raises = True
    with listening(stop):
        try:
            yield
        except KeyboardInterrupt:
            raise InterruptedRunError(
                f"Stopped with {progress.done:,} of {progress.total:,} samples of {name} in {out}.",
                f"The same command goes on: {shlex.join(['tpukit', *sys.argv[1:]])}",
                signal_number=stop.signal_number or signal.SIGINT,
            ) from None
