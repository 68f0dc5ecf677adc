"""The options that a command takes from the task that its line names."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import MISSING
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer

from tpukit.commands.options.option_sets import Given, help_text, option_parameter, with_option_sets
from tpukit.errors import ConfigError
from tpukit.registry.declared import (
    ClassSource,
    OptionField,
    find_source,
    registered,
    setting_fields,
    task_of_run,
)
from tpukit.train.config import build

DECLARED = {
    "train": "options", "summarize-train": "options", "probe-batch": "options",
    "test": "test_options", "predict": "predict_options",
}  # fmt: skip
"""Command -> what a task calls its options of it."""
DEFAULT_TASKS = {
    "train": "eit", "probe-batch": "eit", "test": "eit",
    "summarize-train": "summarize", "predict": "summarize",
}  # fmt: skip
"""Command -> the task that it is about without `--task` and `--run`."""
TaskOption = Annotated[
    str,
    typer.Option(
        "--task", help=f"{', '.join(registered())}, or my_file.py:MyTask; with --help, its options."
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
    """The task that a command line is about: `--task`, the run's own, the command's default."""
    if task := value_of("--task", arguments):
        return task
    default = DEFAULT_TASKS[command]
    if DECLARED[command] == "options" or value_of("--checkpoint", arguments):
        return default
    return task_of_run(Path(value_of("--run", arguments) or default_run(command))) or default


def command_of(task: str) -> str:
    """The command that trains a task: one without `--task` where there is one."""
    trained = ("summarize-train", "train")
    return next((c for c in trained if DEFAULT_TASKS[c] == task), "train")


def default_run(command: str) -> Path:
    """The run of `test` and `predict` where none is named."""
    source = find_source(DEFAULT_TASKS[command])
    assert source is not None, "the default tasks are ours"
    return Path(source.member("folder"))


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
