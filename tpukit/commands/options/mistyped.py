"""What a command line that cannot be read should have said."""

import difflib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from tpukit.commands.options.own_options import (
    DECLARED,
    DEFAULT_TASK,
    command_of,
    declared_options,
    named_task,
    value_of,
)
from tpukit.io.ranges import shown
from tpukit.knowledge.setting_names import nearest_setting
from tpukit.registry.declared import registered

EXPECTED = re.compile("Input should be a valid (number|integer)")
"""How typer's validation begins."""
KINDS = {"number": "a number", "integer": "a whole number"}


def explain_usage(error: Any, arguments: Sequence[str], commands: Sequence[str]) -> None:
    """Adds to a usage error what was probably meant; `commands` are those of the program."""
    option = getattr(error, "option_name", None)
    if option is not None:
        command = error.ctx and error.ctx.command
        if hints := list(_option_hints(option.lstrip("-"), arguments, command)):
            error.possibilities = None
            error.message += ". " + " ".join(hints)
    elif error.message.startswith("No such command") and "Did you mean" not in error.message:
        if near := difflib.get_close_matches(arguments[0], commands, n=1):
            error.message = f"{error.message.rstrip('.')}. Did you mean {near[0]}?"
    elif found := EXPECTED.match(error.message):
        flags = getattr(getattr(error, "param", None), "opts", ())
        given = (value_of(flag, arguments) for flag in flags)
        value = next((text for text in given if text is not None), None)
        error.message = f"{shown(value)} is not {KINDS[found[1]]}."
    else:
        error.message = error.message.removeprefix("Value error, ")


def _option_hints(option: str, arguments: Sequence[str], command: Any) -> Iterator[str]:
    """For an option that a command does not have: its name of it, or the tasks that have it."""
    name = option.replace("-", "_")
    known = {own.removeprefix("--"): own for p in getattr(command, "params", ()) for own in p.opts}
    names = {own.replace("-", "_"): flag for own, flag in known.items()}
    near = nearest_setting(name, names)
    line = getattr(command, "name", None) or ""
    holders = []
    if line in DECLARED:
        holders = [t for t in registered() if name in (o.name for o in declared_options(line, t))]
    if holders:
        value = value_of(f"--{option}", arguments) or "VALUE"
        yield f"Task {named_task(line, arguments)} has no such option."
        yield from (_way_of(line, task, f"--{name.replace('_', '-')} {value}") for task in holders)
    elif near is not None:
        yield f"Did you mean {names[near]}?"


def _way_of(command: str, task: str, option: str) -> str:
    """How an option is given to a task that has it."""
    if DECLARED[command] != "options":
        return f"Task {task} has one: give a run of it."
    own = command_of(task) if command in ("train", "summarize-train") else command
    chosen = "" if own != "train" or task == DEFAULT_TASK else f" --task {task}"
    return f"For {task}: tpukit {own}{chosen} {option}."
