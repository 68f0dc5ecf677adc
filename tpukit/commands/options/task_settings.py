"""The settings of a task for `--help` and for hints, read from its source: nothing is imported."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer

from tpukit.commands.options.option_sets import documented_fields

ROOT = Path(__file__).parents[2]
CONFIGS = {
    "eit": (ROOT / "tasks/eit/task.py", "EITConfig"),
    "images": (ROOT / "tasks/images/images_config.py", "ImagesConfig"),
    "summarize": (ROOT / "tasks/summarize/settings.py", "SummarizeConfig"),
}
"""Task -> file and class of its settings."""
DEFAULT_TASKS = {"train": "eit", "probe-batch": "eit", "summarize-train": "summarize"}
"""Command -> the task that it is about without `--task`."""
HELP = {"--help", "-h"}
PANELS = {"eit": "EIT", "summarize": "Summaries"}
"""Task -> panel of the options that are settings of it alone."""


@dataclass(frozen=True)
class TaskSetting:
    """A setting as the source has it."""

    name: str
    kind: str
    """Its annotation; empty where there is none."""
    default: str
    """`default: 5`, `must be given`."""
    text: str


def settings_of_task(spec: str) -> list[TaskSetting]:
    """The settings of `eit`, `images`, `summarize`, or the constructor's of `FILE:CLASS`.

    Empty where the file or the class cannot be read.
    """
    path, _, name = spec.rpartition(":")
    file, class_name = CONFIGS.get(spec, (Path(path), name))
    with suppress(OSError, ValueError, SyntaxError):
        for found in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(found, ast.ClassDef) and found.name == class_name:
                return list(_fields(found) if spec in CONFIGS else _parameters(found))
    return []


def named_task(command: str, arguments: Sequence[str]) -> str | None:
    """The task that a command line is about; None for commands without one."""
    for argument, after in pairwise([*arguments, ""]):
        if argument == "--task":
            return after
        if argument.startswith("--task="):
            return argument.removeprefix("--task=")
    return DEFAULT_TASKS.get(command)


def list_settings(command: Any, arguments: Sequence[str]) -> None:
    """Adds the settings of the named task to what the command's help shows."""
    task = named_task(command.name, arguments)
    if task is None or command.name not in DEFAULT_TASKS or not HELP & set(arguments):
        return
    others = {panel for name, panel in PANELS.items() if name != task}
    for parameter in command.params:
        if getattr(parameter, "rich_help_panel", None) in others:
            parameter.hidden = True
    taken = {parameter.name for parameter in command.params}
    listed = [setting for setting in settings_of_task(task) if setting.name not in taken]
    command.params += _lines(listed, f"Settings of {task.rpartition(':')[2]}, as --set NAME=VALUE")


def _lines(settings: Sequence[TaskSetting], panel: str) -> list[Any]:
    """Parameters that the help shows; nothing that could be given."""

    def shown() -> None: ...

    names = {f"setting_{setting.name}": _annotation(setting, panel) for setting in settings}
    kind = inspect.Parameter.KEYWORD_ONLY
    shown.__signature__ = inspect.Signature([  # type: ignore[attr-defined]
        inspect.Parameter(name, kind, default=None, annotation=annotation)
        for name, annotation in names.items()
    ])  # fmt: skip
    shown.__annotations__ = names
    app = typer.Typer(add_completion=False)
    app.command()(shown)
    return [p for p in typer.main.get_command(app).params if p.name in names]


def _annotation(setting: TaskSetting, panel: str) -> Any:
    default = "" if "default" in setting.text else f"({setting.default})"
    return Annotated[
        str | None,
        typer.Option(
            f"--set {setting.name}",
            metavar=setting.kind or "VALUE",
            help=f"{setting.text} {default}".strip(),
            rich_help_panel=panel,
            show_default=False,
        ),
    ]


def _fields(definition: ast.ClassDef) -> Iterator[TaskSetting]:
    for name, field, text in documented_fields(definition):
        shown = text.replace("`", "").removesuffix(".")
        yield TaskSetting(name, _kind(field.annotation), _default(field.value), shown)


def _parameters(definition: ast.ClassDef) -> Iterator[TaskSetting]:
    """Of a user's class: the parameters of its constructor."""
    for method in definition.body:
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            given = method.args
            names = [*given.posonlyargs, *given.args]
            required: list[ast.expr | None] = [None] * (len(names) - len(given.defaults))
            pairs = [*zip(names, [*required, *given.defaults], strict=True)][1:]
            pairs += zip(given.kwonlyargs, given.kw_defaults, strict=True)
            for name, value in pairs:
                yield TaskSetting(name.arg, _kind(name.annotation), _default(value), "")


def _kind(annotation: ast.expr | None) -> str:
    """An annotation without its None: `int`, `none|flip`."""
    text = ast.unparse(annotation).replace(" | None", "") if annotation else ""
    choices = re.fullmatch(r"Literal\[(.*)\]", text)
    return choices[1].replace("'", "").replace(", ", "|") if choices else text


def _default(value: ast.expr | None) -> str:
    if value is None:
        return "must be given"
    text = ast.unparse(value)
    text = "none" if text == "None" else text.strip("'") or text
    return f"default: {text}"
