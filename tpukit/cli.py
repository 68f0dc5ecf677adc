"""The Typer app (commands are imported when they are called) and the one error boundary."""

import importlib
import io
import os
import re
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from tpukit import __version__
from tpukit.errors import TpukitError, UsageError
from tpukit.io.interrupts import OutputLostError, end_when_stuck, make_output_lasting
from tpukit.io.notebook import follow_this_command, follower, hang_up_with, in_notebook
from tpukit.io.secrets import without_secrets

# Newer typers carry their own click: its classes are reached through typer's public names.
ClickUsageError: Any = typer.BadParameter.__mro__[1]
ClickError: Any = typer.BadParameter.__mro__[2]

SIGNAL_BASE = 128
"""A shell's exit code for an end by a signal is this plus its number."""

NAME_MAX = 255
"""Bytes that a name may have on most file systems."""

STARTS_NOTHING = {"-h", "--help", "--version", "--quick"}
"""What leaves no temporary files; a folder for them would take a tenth of its time."""

NARROW = 70
"""Columns below which help is plain text."""

UNTOUCHED = "run"
"""The command whose environment and output are another program's."""

TRAINING = {"train", "summarize-train"}
"""What must not be killed with a notebook's cell before it has saved."""

COMMANDS = {
    "doctor": "Check the environment, scan code for deprecated calls, explain an error log.",
    "probe-batch": "Find the largest batch size: measured here, or by the TPU compiler.",
    "train": "Train a task ({tasks}) or one of your own.",
    "test": "Evaluate a run: metrics, baselines and pictures.",
    "summarize-train": "Fine-tune a language model on dialogue summaries.",
    "predict": "Write a submission of images or summaries, or the images of an EIT folder.",
    "runs": "Compare trained runs: settings that differ, best metric, time, MFU and state.",
    "data": "Generate synthetic data sets.",
    "run": "Run any command, keep its output, and explain why it failed or hangs.",
}


class LazyGroup(TyperGroup):
    """A group that imports a command's module only when that command is called."""

    only_listing = False
    arguments: Sequence[str] = ()
    """What follows the command's name."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        return (
            placeholder(cmd_name) if self.only_listing else load_command(cmd_name, self.arguments)
        )

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        self.arguments = args[1:]
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:  # Typer would return 130 without a word.
            raise typer.Abort from error

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.only_listing = True
        super().format_help(ctx, formatter)


def placeholder(name: str) -> TyperCommand:
    """A command that can be listed in `--help`, and nothing more."""
    from tpukit.registry.declared import registered

    text = COMMANDS[name].format(tasks=", ".join(registered()))
    return TyperCommand(name, help=text, short_help=text)


def app_of(name: str, arguments: Sequence[str] = ()) -> typer.Typer:
    """The app that a command's module has or makes, else one of its function with own options."""
    function = name.replace("-", "_")
    module: Any = importlib.import_module(f"tpukit.commands.{function}")
    if hasattr(module, "app"):
        return module.app  # type: ignore[no-any-return]
    if hasattr(module, "make_app"):
        return module.make_app(arguments)  # type: ignore[no-any-return]
    from tpukit.commands.options.own_options import app_with_own_options

    return app_with_own_options(getattr(module, function), name, arguments)


def load_command(name: str, arguments: Sequence[str] = ()) -> Any:
    """The command `name` from `tpukit.commands`, with the options of the task that is named."""
    app = app_of(name, arguments)
    # Completion is installed for the whole program, not for one command of it.
    app._add_completion = False
    command = typer.main.get_command(app)
    command.name = name
    _fit_help(command)
    return command


def _fit_help(command: Any) -> None:
    """No default where there is none (older typers write `None`), no boxes in a narrow terminal."""
    for parameter in command.params:
        if parameter.default is None:
            parameter.show_default = False
    if _narrow_width():
        command.rich_markup_mode = None
        command.format_help = partial(_format_narrow, command.format_help)
    for below in getattr(command, "commands", {}).values():
        _fit_help(below)


def _format_narrow(format_help: Callable[..., None], ctx: Any, formatter: Any) -> None:
    """Help with each description below its option, not beside it."""
    formatter.write_dl = partial(formatter.write_dl, col_max=2)
    format_help(ctx, formatter)


def _narrow_width() -> int | None:
    """The columns of a terminal in which boxes would cut the names of options; else None."""
    columns = shutil.get_terminal_size().columns
    return columns if columns < NARROW else None


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    rich_markup_mode=None,  # importing rich takes longer than everything else
    help="Train PyTorch models on TPUs, GPUs and CPUs, and know beforehand what fits.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(requested: bool) -> None:
    if requested:
        print(f"tpukit {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Train PyTorch models on TPUs, GPUs and CPUs, and know beforehand what fits."""


def main() -> NoReturn:
    """Runs the command line; every error ends here, in one or two lines."""
    arguments = sys.argv[1:]
    if arguments[:1] == [UNTOUCHED]:
        sys.exit(run(arguments))
    make_output_lasting()
    _silence_libraries()
    if not arguments or STARTS_NOTHING & set(arguments):
        sys.exit(run(arguments))
    # The ranks of a launch end with their launcher.
    if arguments[0] in TRAINING and "RANK" not in os.environ:
        if followed_by := follower():
            hang_up_with(followed_by)
        elif in_notebook():
            sys.exit(follow_this_command())
    end_when_stuck()
    from tpukit.io.folders import own_temporary_folder

    with own_temporary_folder():
        code = run(arguments)
    _end_workers()
    if "RANK" in os.environ and "TPUKIT_STATUS" not in os.environ:
        # torchrun's own rank; one of tpukit's launcher leaves its exit code before it ends.
        from tpukit.hardware.launch.failures import end_rank

        end_rank(code)
    sys.exit(code)


def _end_workers() -> None:
    """Kills workers that an error has left: Python would wait for those that hang."""
    if multiprocessing := sys.modules.get("multiprocessing"):
        # torch would raise for each of them.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for worker in multiprocessing.active_children():
            worker.kill()


def _silence_libraries() -> None:
    """Leaves out what libraries tell their own users, here and in child processes.

    `PYTHONWARNINGS` or `python -W` shows the warnings again.
    """
    if not sys.warnoptions:
        import warnings

        for category in (DeprecationWarning, PendingDeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", category)
        os.environ["PYTHONWARNINGS"] = "ignore::DeprecationWarning,ignore::FutureWarning"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    if in_notebook():
        # ipykernel asks for colours; a saved notebook, and a log of it, keep their codes.
        os.environ["NO_COLOR"] = "1"
        for name in ("FORCE_COLOR", "CLICOLOR_FORCE"):
            os.environ.pop(name, None)


def run(arguments: list[str]) -> int:
    """The exit code of one command line."""
    try:
        return _run(arguments)
    except OutputLostError:  # `| head`: nobody to say it to
        return SIGNAL_BASE + signal.SIGPIPE


def _run(arguments: list[str]) -> int:
    # Before torch is imported: torch_tpu would load, and hang on a machine without a TPU.
    if arguments[:1] != [UNTOUCHED]:
        os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    try:
        code = app(
            args=arguments,
            standalone_mode=False,
            prog_name="tpukit",
            terminal_width=_narrow_width(),
        )
        return code if isinstance(code, int) else 0
    except typer.Exit as error:
        return error.exit_code
    except ClickError as error:
        return _report_usage(error, arguments)
    except OutputLostError:
        raise
    except (KeyboardInterrupt, typer.Abort):
        return _report("Interrupted.", None, "interrupted", SIGNAL_BASE + signal.SIGINT, arguments)
    except Exception as error:
        if "--debug" in arguments:
            traceback.print_exc()
        message, hint, error_id = _explain(error)
        if isinstance(error, UsageError):
            message = _named(message, hint or "", arguments)
        if isinstance(error, TpukitError):
            return _report(message, hint, error_id, error.exit_code, arguments)
        named = _named(message, "", arguments) if isinstance(error, OSError) else message
        # What concerns a file that was given is bad input.
        return _report(named, hint, error_id, 1 if named == message else 2, arguments)


def _report_usage(error: Any, arguments: list[str]) -> int:
    from tpukit.commands.options.mistyped import explain_usage

    explain_usage(error, arguments, list(COMMANDS))
    if isinstance(error, ClickUsageError) and "--json" not in arguments:
        shown = io.StringIO()
        error.show(file=shown)
        print(shown.getvalue().replace("\nError: ", f"\n{_error_mark()}"), end="", file=sys.stderr)
        return 2
    return _report(error.format_message(), None, "usage", 2, arguments)


def _report(
    message: str, hint: str | None, error_id: str, exit_code: int, arguments: list[str]
) -> int:
    from tpukit.commands.output import json_error, write_json_error

    prefix = "" if exit_code > SIGNAL_BASE else _error_mark()
    lines = [prefix + _printable(without_secrets(message))]
    if hint:
        lines.append(_printable(without_secrets(f"  {hint}")))
    text, error = "\n".join(lines) + "\n", json_error(message, hint, error_id)
    as_json = "--json" in arguments
    if "RANK" in os.environ and exit_code < SIGNAL_BASE:
        from tpukit.hardware.launch.launcher import leave_status

        # torchrun may end this rank before it has printed.
        if leave_status(exit_code, error_id=error_id, stderr=text, stdout=error * as_json):
            return exit_code
    print(text, end="", file=sys.stderr)
    if as_json:
        write_json_error(error)
    return exit_code


def _error_mark() -> str:
    """`Error: `, red in a terminal that has colours."""
    plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    return "Error: " if plain or not sys.stderr.isatty() else "\x1b[1;31mError:\x1b[0m "


def _printable(text: str) -> str:
    """Control characters of a value or a file's name as escapes: a terminal would obey them."""
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )


def _named(message: str, hint: str, arguments: list[str]) -> str:
    """The message, beginning with the option whose file or folder it is about."""
    pairs, flags = [a.split("=", 1) for a in arguments if "=" in a], _flags(arguments)
    pairs += [list(pair) for pair in pairwise(arguments) if pair[0] not in flags]
    # The longest: a run's folder may lie in that of the data.
    for option, value in sorted(pairs, key=lambda pair: -len(pair[1])):
        is_path = "/" in value or bool(re.search(r"\.[a-z]\w*$", value)) or len(value) > NAME_MAX
        if option[2:] and option.startswith("--") and is_path and not value.startswith("-"):
            # A path is shown without double slashes: a URL loses one of its own.
            shown = str(Path(value))
            if shown in message:
                short = shown if len(shown) <= NAME_MAX else f"{shown[:60]}...{shown[-20:]}"
                message = message.replace(shown, short)
                return message if option in f"{message} {hint}" else f"{option}: {message}"
    return message


def _flags(arguments: list[str]) -> set[str]:
    """The options of a command line's command that take no value."""
    with suppress(Exception):
        command = load_command(arguments[0], arguments[1:])
        command = getattr(command, "commands", {}).get(arguments[1], command)
        flags = [p.opts + p.secondary_opts for p in command.params if getattr(p, "is_flag", False)]
        return {name for names in flags for name in names}
    return set()


def _with_notes(message: str, error: Exception) -> str:
    """The message, and where in the run: `in step 3`."""
    notes = getattr(error, "__notes__", [])
    return ", ".join([message.removesuffix("."), *notes]) if notes else message


def _explain(error: Exception) -> tuple[str, str | None, str]:
    """Message, hint and id: tpukit's own error, or an unexpected one as the knowledge explains it.

    Of a user's own code the method and the line are named.
    """
    from tpukit.io.files import how_to_go_on
    from tpukit.probe.logs.explain import explain_exception
    from tpukit.train.user_code import cause_line, task_failure

    failure = task_failure(error)
    if failure is None and isinstance(error, TpukitError):
        return _with_notes(error.message, error), error.hint, error.id
    message, hint, error_id = _with_notes(cause_line(error), error), None, "unexpected"
    file = None
    if failure is not None:
        message, hint, error_id = failure.message, failure.hint, failure.id
        file = failure.traceback_file
    elif isinstance(error, OSError) and isinstance(error.filename, str) and error.strerror:
        return f"{error.filename}: {error.strerror}.", how_to_go_on(error), "file"
    known = explain_exception(error) if hint is None else None
    if known is not None:
        hint = f"{known.cause} {known.fix}"
        # A family of exceptions says less of what failed than the id that it has.
        error_id = known.id if known.entry.match or known.entry.regex else error_id
    if file is not None or hint is None:
        place = f"The traceback is in {file}." if file else "Add --debug for the traceback."
        hint = f"{hint} {place}" if hint else place
    return message, hint, error_id
