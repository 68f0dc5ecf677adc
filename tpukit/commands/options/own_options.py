"""The options that a command takes from the task that its line names."""

import inspect
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import MISSING
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer

from tpukit.commands.options.option_sets import Given, help_text, option_parameter, with_option_sets
from tpukit.errors import ConfigError, DataError, TpukitError
from tpukit.io.hub_data import local_data
from tpukit.io.mirror import path_here
from tpukit.io.remote import Remote, address_of
from tpukit.registry.declared import (
    ClassSource,
    OptionField,
    find_source,
    registered,
    setting_fields,
    task_of_run,
)
from tpukit.registry.recognise import (
    Recognised,
    data_needs,
    recognised,
    registered_generators,
    run_folder_of,
    runs_here,
)
from tpukit.train.config import TrainConfig, build

DATA = TrainConfig.data_path
SHOWN_RUNS = 8
DECLARED = {
    "train": "options", "summarize-train": "options", "probe-batch": "options",
    "test": "test_options", "predict": "predict_options",
}  # fmt: skip
"""Command -> what a task calls its options of it."""
DEFAULT_TASK = "eit"
"""The task of a command line that names neither task nor data nor run."""
OWN_COMMANDS = {"summarize-train": "llm"}
"""Command -> the one task that it is about."""
TaskOption = Annotated[
    str | None,
    typer.Option(
        "--task",
        help=f"{', '.join(registered())}, or my_file.py:MyTask (default: by the data); with --help,"
        " its options.",
    ),
]


def app_with_own_options(
    command: Callable[..., Any], name: str, arguments: Sequence[str]
) -> typer.Typer:
    """The app of a command that takes the options of the task named by its arguments."""
    app = typer.Typer()
    app.command()(with_option_sets(command, own_parameters(name, arguments)))
    return app


def own_parameters(command: str, arguments: Sequence[str]) -> list[inspect.Parameter]:
    """The declared options of the task that a command line names."""
    task = named_task(command, arguments)
    panel = f"Task {task.rpartition(':')[2]}"
    return [as_parameter(field, panel) for field in declared_options(command, task)]


def as_parameter(field: OptionField, panel: str | None) -> inspect.Parameter:
    """The option of a field."""
    if field.default is MISSING:
        text, default = f"{field.text} (must be given)".strip(), None
    else:
        default = None if field.default is ... else field.default
        text = help_text(field.text.replace("`", ""), default)
    return option_parameter(field.name, field.hint, text, default, panel)


def declared_options(command: str, task: str) -> list[OptionField]:
    """What a task declares for a command; empty where its source cannot be read."""
    source = find_source(task)
    if source is None:
        return []
    if DECLARED[command] == "options":
        return setting_fields(source)
    options = source.member(DECLARED[command])
    return options.fields() if isinstance(options, ClassSource) else []


def named_task(command: str, arguments: Sequence[str]) -> str:
    """The task that a command line is about: `--task`, the command's, the data's, the run's."""
    if task := value_of("--task", arguments) or OWN_COMMANDS.get(command):
        return task
    with suppress(TpukitError):  # the command says it
        if DECLARED[command] == "options":
            return task_for(value_of("--data-path", arguments), command).task
        if not value_of("--checkpoint", arguments):
            run = Path(value_of("--run", arguments) or default_run(None))
            return task_of_run(_run_here(run)) or DEFAULT_TASK
    return DEFAULT_TASK


def _run_here(run: Path) -> Path:
    """A folder with the `config.toml` of a run at a path or an address."""
    address = address_of(run)
    if address is None:
        return run
    folder = address.partition("/checkpoints/")[0]
    here = path_here(folder)
    if content := Remote(folder).read("config.toml"):
        here.mkdir(parents=True, exist_ok=True)
        (here / "config.toml").write_bytes(content)
    return here


def task_for(data_path: str | None, command: str) -> Recognised:
    """The task of a training command without `--task`: that of the data path, or of ./data.

    The reason is empty where nothing was looked at. A search for a batch needs no data: without a
    path it looks at none. Raises ConfigError for a path whose task is not clear, DataError for one
    that is not there.
    """
    path = local_data(data_path or DATA) if address_of(data_path) else Path(data_path or DATA)
    found = recognised(path) if data_path or command == "train" else []
    if len(found) == 1:
        return found[0]
    if data_path is None or (command != "train" and not path.exists()):
        return Recognised(DEFAULT_TASK, "")
    if not path.exists():
        names = ", ".join(registered_generators())
        raise DataError(
            f"There is no data at {path}.",
            f"--data-path names another folder; `tpukit data NAME --out {shlex.quote(str(path))}`"
            f" makes some: {names}.",
        )
    fits = " and ".join(f"{task} (by {reason})" for task, reason in found)
    raise ConfigError(
        f"--data-path {path} is data of {fits}." if found
        else f"--data-path {path}: the task is not clear from what it holds.",
        f"Name it with --task. {data_needs()}.",
        id="which-task",
    )  # fmt: skip


def command_of(task: str) -> str:
    """The command that trains a task: one without `--task` where there is one."""
    return next((c for c, own in OWN_COMMANDS.items() if own == task), "train")


def default_run(task: str | None) -> Path:
    """The run of `test` and `predict` where none is named: the task's own folder, or the one run
    that there is.

    Raises ConfigError where there are several.
    """
    if task is not None and (folder := run_folder_of(task)) is not None:
        return folder
    runs = runs_here()
    if len(runs) > 1:
        raise ConfigError(
            f"there are {len(runs)} runs here: {', '.join(map(str, runs[:SHOWN_RUNS]))}"
            + (", ..." if len(runs) > SHOWN_RUNS else "."),
            "Name one with --run DIR.",
            id="which-run",
        )
    own = run_folder_of(DEFAULT_TASK)
    assert own is not None, "the default task is ours"
    return runs[0] if runs else own


def value_of(option: str, arguments: Sequence[str]) -> str | None:
    """What a command line gives to an option, the first time."""
    for argument, after in pairwise([*arguments, ""]):
        flag, _, value = argument.partition("=")
        if flag == option:
            return value if "=" in argument else after
    return None


def build_own(task: Any, command: str, given: Given) -> Any:
    """The declared options of a task (an object or a class), built; None where it has none.

    Raises ConfigError for options that it does not declare and values that it does not take.
    """
    options = getattr(task, DECLARED[command])
    if options is not None:
        return build(options, given)
    for name in given:
        raise ConfigError(
            f"unknown option {name!r}: task {task.name!r} has none of its own for {command}.",
            f"A task of yours declares them as `{DECLARED[command]}`, a dataclass.",
        )
    return None
