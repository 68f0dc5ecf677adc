"""What a command line that cannot be read should have said."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from tpukit.commands.options.task_settings import CONFIGS, named_task, settings_of_task
from tpukit.io.ranges import shown
from tpukit.knowledge.setting_names import nearest_setting

EXPECTED = re.compile("Input should be a valid (number|integer)")
"""How typer's validation begins."""
KINDS = {"number": "a number", "integer": "a whole number"}


def explain_usage(error: Any, arguments: Sequence[str], commands: Sequence[str]) -> None:
    """Adds to a usage error what was probably meant; `commands` are those of the program."""
    option = getattr(error, "option_name", None)
    if option is not None:
        if hints := list(_option_hints(option.lstrip("-"), arguments, _command_of(error))):
            error.possibilities = None
            error.message += ". " + " ".join(hints)
    elif error.message.startswith("No such command") and "Did you mean" not in error.message:
        if near := difflib.get_close_matches(arguments[0], commands, n=1):
            error.message = f"{error.message.rstrip('.')}. Did you mean {near[0]}?"
    elif found := EXPECTED.match(error.message):
        value = _value_of(getattr(error, "param", None), arguments)
        error.message = f"{shown(value)} is not {KINDS[found[1]]}."
    else:
        error.message = error.message.removeprefix("Value error, ")


def _command_of(error: Any) -> Any:
    return error.ctx.command if error.ctx is not None else None


def _option_hints(option: str, arguments: Sequence[str], command: Any) -> Iterator[str]:
    """For an option that a command does not have: its own name of it, or the task's setting."""
    name = option.replace("-", "_")
    known = {own.removeprefix("--"): own for p in getattr(command, "params", ()) for own in p.opts}
    names = {own.replace("-", "_"): flag for own, flag in known.items()}
    near = nearest_setting(name, names)
    task = named_task(getattr(command, "name", None) or "", arguments)
    holders = [t for t in CONFIGS if any(s.name == name for s in settings_of_task(t))]
    value = dict(pairwise(arguments)).get(f"--{option}", "VALUE")
    if task is not None and any(s.name == name for s in settings_of_task(task)):
        yield f"It is a setting of {task}: --set {name}={value}"
    elif task is not None and holders:
        yield " ".join(_ways_of(holders, name, value))
    elif near is not None:
        yield f"Did you mean {names[near]}?"


def _ways_of(holders: Sequence[str], name: str, value: str) -> Iterator[str]:
    """How a setting is given to the tasks that have it."""
    for task in holders:
        if task == "summarize":
            yield f"For summaries: tpukit summarize-train --{name.replace('_', '-')} {value}."
        else:
            yield f"For {task}: --task {task} --set {name}={value}."


def _value_of(param: Any, arguments: Sequence[str]) -> str | None:
    """What a command line gives to an option."""
    for argument, after in pairwise([*arguments, ""]):
        flag, _, value = argument.partition("=")
        if flag in getattr(param, "opts", ()):
            return value if "=" in argument else after
    return None
