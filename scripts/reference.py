"""Writes docs/reference.md from the code: commands, options, JSON fields, variables, `Task`.

    python scripts/reference.py

Options come from the commands' signatures, settings from the configs' fields, `Task` from its
docstrings. The meaning of JSON fields and environment variables stands in scripts/reference.toml;
the names in the code and there must be the same. No torch is imported.
"""

import ast
import enum
import functools
import inspect
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference.md"
TEXTS = ROOT / "scripts" / "reference.toml"
PACKAGE = ROOT / "tpukit"
sys.path.insert(0, str(ROOT))


from tpukit.cli import COMMANDS, app_of  # noqa: E402
from tpukit.commands.options.option_sets import field_docs  # noqa: E402
from tpukit.registry.declared import ClassSource, find_source, registered  # noqa: E402
from tpukit.train.config import ARITHMETIC, OPTIONS, TrainConfig  # noqa: E402

VARIABLE = re.compile(r"TPUKIT_[A-Z0-9_]+")


# -- tables ----------------------------------------------------------------------------------------
def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """Lines of a Markdown table."""
    listed = [[*head], *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    lines = ["| " + " | ".join(row) + " |" for row in listed]
    return [lines[0], "|---" * len(listed[0]) + "|", *lines[1:]]


def kind(annotation: Any) -> str:
    """What an option takes, as `--help` has it: `int`, `auto|tpu`, nothing for a flag."""
    if get_origin(annotation) is Literal:
        return "|".join(map(str, get_args(annotation)))
    several = [part for part in get_args(annotation) if part is not type(None)]
    if get_origin(annotation) is list:
        return f"{kind(several[0])} ..."
    if several:
        return kind(several[0])
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return "|".join(str(choice.value) for choice in annotation)
    plain = {"bool": "", "str": "text", "Any": "text", "Path": "path"}
    return plain.get(annotation.__name__, annotation.__name__)


# -- commands --------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Option:
    names: str
    value: str
    text: str


def option(parameter: inspect.Parameter) -> Option:
    annotated, info = get_args(parameter.annotation)[:2]
    flag = f"--{parameter.name.replace('_', '-')}"
    argument = type(info).__name__ == "ArgumentInfo"
    # Within Annotated, typer keeps the first name as the default.
    given = [name for name in (info.default, *(info.param_decls or ())) if isinstance(name, str)]
    names = [info.metavar or parameter.name] if argument else given or [flag]
    value = "" if argument else info.metavar or kind(annotated)
    default = parameter.default.value if isinstance(parameter.default, enum.Enum) else (
        parameter.default)  # fmt: skip
    text = info.help or ""
    if not isinstance(default, (bool, type, NoneType)) and f"({default})" not in text:
        text = f"{text.removesuffix('.')} (default: {default})."
    return Option(f"`{', '.join(names)}`", f"`{value}`" if value else "", text)


def commands() -> Iterator[tuple[str, str, list[Option]]]:
    """Name, help and options of each command."""
    for name in COMMANDS:
        app = app_of(name)
        for found in app.registered_commands:
            below = found.name or found.callback.__name__
            parameters = inspect.signature(found.callback, eval_str=True).parameters.values()
            shown = name if len(app.registered_commands) == 1 else f"{name} {below}"
            first = inspect.getdoc(found.callback) or COMMANDS[name]
            options = [option(p) for p in parameters if not of_a_task(p)]
            yield shown, (found.help or first).split("\n\n")[0], options


def of_a_task(parameter: inspect.Parameter) -> bool:
    """Whether an option is declared by a task."""
    panel = getattr(get_args(parameter.annotation)[1], "rich_help_panel", None)
    return isinstance(panel, str) and panel.startswith("Task ")


def command_lines() -> Iterator[str]:
    listed = [*commands()]
    users: dict[Option, list[str]] = {}
    for name, _, options in listed:
        for each in options:
            users.setdefault(each, []).append(name)
    shared = {each: names for each, names in users.items() if len(names) > 1}
    yield from ("## Commands", "", "`--help` of each command lists the same.")
    head = ("option", "value", "meaning")
    for name, text, options in listed:
        own = [each for each in options if each not in shared]
        yield from ("", f"### {name}", "", text, "")
        yield from table(head, ((each.names, each.value, each.text) for each in own)) if own else ()
    yield from ("", "### Options of several commands", "")
    rows = (
        (e.names, e.value, "all" if len(names) == len(listed) else ", ".join(names), e.text)
        for e, names in shared.items()
    )
    yield from table((*head[:2], "commands", head[2]), rows)


# -- settings --------------------------------------------------------------------------------------
def setting_lines() -> Iterator[str]:
    yield from ("## Settings", "", "`--set NAME=VALUE`, or a key of `--config FILE.toml`: training"
                " settings at the top or under `[train]`, the task's under `[task]`. Every training"
                " option is a key too.", "", "### Training", "")  # fmt: skip
    hints, docs = get_type_hints(TrainConfig), field_docs(TrainConfig)
    optional = {name for panel in OPTIONS.values() for name in panel}
    rows = [
        (f"`{field.name}`", f"`{kind(hints[field.name]) or 'bool'}`",
         str(field.metadata.get("range") or ""), f"`{field.default}`", docs[field.name])
        for field in fields(TrainConfig)
        if field.name not in optional
    ]  # fmt: skip
    yield from table(("setting", "value", "range", "default", "meaning"), rows)
    shared = ", ".join(f"`{name}`" for name in ARITHMETIC)
    yield from ("", f"A resumed run must have the same {shared}.")
    commands = {"options": "`train`, `probe-batch`, `[task]` and `--set`",
                "test_options": "`test`", "predict_options": "`predict`"}  # fmt: skip
    for task in registered():
        source = find_source(task)
        assert source is not None
        for name, users in commands.items():
            declared = source.member(name)
            if isinstance(declared, ClassSource):
                yield from ("", f"### Task {task}: options of {users}", "")
                rows = [(f"`--{f.name.replace('_', '-')}`", f"`{kind(f.hint) or 'bool'}`",
                         f"`{f.default}`", f.text) for f in declared.fields()]  # fmt: skip
                yield from table(("option", "value", "default", "meaning"), rows)


# -- JSON fields -----------------------------------------------------------------------------------
@functools.cache
def nodes() -> list[ast.AST]:
    """Every node of the package's modules."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return [n for p in paths for n in ast.walk(ast.parse(p.read_text(encoding="utf-8")))]


@functools.cache
def definitions() -> dict[str, ast.FunctionDef | ast.ClassDef]:
    """The first function or class of each name."""
    found = [node for node in nodes() if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return {node.name: node for node in reversed(found)}


def produced(place: str) -> set[str]:
    """Fields of a `Class`, or keys of the dicts that a `function` or `Class.method` writes."""
    owner, _, method = place.partition(".")
    node = definitions().get(owner)
    if isinstance(node, ast.ClassDef) and method:
        [node] = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == method]
    if isinstance(node, ast.ClassDef):
        declared = [n.target for n in node.body if isinstance(n, ast.AnnAssign)]
        return {target.id for target in declared if isinstance(target, ast.Name)}
    if node is None:
        raise LookupError(f"{TEXTS.name}: {place} is not in the package.")
    return dict_keys(node)


def dict_keys(function: ast.FunctionDef) -> set[str]:
    """Keys of the outermost dicts in a function."""
    found: set[str] = set()
    ahead: list[ast.AST] = [function]
    while ahead:
        node = ahead.pop()
        if isinstance(node, ast.Dict):
            found |= {k.value for k in node.keys if isinstance(k, ast.Constant)}
        else:
            ahead += ast.iter_child_nodes(node)
    return found


def json_problems(texts: Mapping[str, Any]) -> list[str]:
    """Fields that the code writes and reference.toml does not explain, or the reverse."""
    words = {
        node.value if isinstance(node, ast.Constant) else node.target.id  # type: ignore[attr-defined]
        for node in nodes()
        if (isinstance(node, ast.Constant) and isinstance(node.value, str))
        or (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name))
    }
    problems = []
    for title, table in texts.items():
        described = {name.strip() for key in table["fields"] for name in key.split(",")}
        written = {key for place in table.get("from", ()) for key in produced(place)}
        problems += [f"{title}: {key} is not explained" for key in sorted(written - described)]
        # A name with a placeholder, as `NAME_baseline`, is built where it is written.
        plain = {name for name in described if name == name.lower()}
        problems += [f"{title}: nothing writes {name}" for name in sorted(plain - words)]
    return problems


def json_lines(texts: Mapping[str, Any]) -> Iterator[str]:
    yield from ("## JSON fields", "", "`--json` prints one object. A failure is"
                " `{\"error\": {\"message\", \"hint\", \"id\"}}`.")  # fmt: skip
    for title, content in texts.items():
        yield from ("", f"### {title}", "")
        if about := content.get("about"):
            yield from (about, "")
        rows = (
            (f"`{name}`".replace(", ", "`, `"), text) for name, text in content["fields"].items()
        )
        yield from table(("field", "meaning"), rows)


# -- environment variables -------------------------------------------------------------------------
def variable_names() -> set[str]:
    """Each TPUKIT_ variable that the package names."""
    return {
        name
        for path in PACKAGE.rglob("*.py")
        for name in VARIABLE.findall(path.read_text(encoding="utf-8"))
    }


def variable_lines(texts: Mapping[str, str]) -> Iterator[str]:
    yield from ("## Environment variables", "")
    yield from table(("variable", "meaning"), ((f"`{n}`", text) for n, text in texts.items()))


# -- Task ------------------------------------------------------------------------------------------
def task_class(file: str = "task.py", name: str = "Task") -> ast.ClassDef:
    tree = ast.parse((PACKAGE / "train" / file).read_text(encoding="utf-8"))
    [found] = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name]
    return found


def methods_of(cls: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {
        node.name: node
        for node in cls.body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    }


def optional_methods() -> dict[str, ast.FunctionDef]:
    return methods_of(task_class("optional_methods.py", "OptionalMethods"))


def task_methods() -> dict[str, ast.FunctionDef]:
    return methods_of(task_class()) | optional_methods()


def task_problems(phases: Mapping[str, list[str]]) -> list[str]:
    listed = [name for names in phases.values() for name in names]
    return [
        *(f"Task.{name} is in no phase" for name in task_methods() if listed.count(name) != 1),
        *(f"Task.{name} does not exist" for name in listed if name not in task_methods()),
    ]


def task_lines(phases: Mapping[str, list[str]]) -> Iterator[str]:
    yield from ("## Task", "")
    yield (
        "The methods of `tpukit.Task` by when they are called. `build_model`, `datasets` and `loss`"
        " must be given; those with * are optional, and `super()` has none."
        " [own_task.md](own_task.md) is the guide."
    )
    yield ""
    rows = []
    for phase, names in phases.items():
        for name in names:
            method = task_methods()[name]
            given = [argument.arg for argument in method.args.args[1:]]
            text = " ".join((ast.get_docstring(method) or "").split())
            mark = " *" * (name in optional_methods())
            rows.append((phase, f"`{name}({', '.join(given)})`{mark}", text))
    yield from table(("when", "method", "meaning"), rows)
    docs = {
        before.target.id: " ".join(after.value.value.split())
        for before, after in zip(task_class().body, task_class().body[1:], strict=False)
        if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name)
        and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    }  # fmt: skip
    yield ""
    yield from table(("attribute", "meaning"), ((f"`{name}`", text) for name, text in docs.items()
                                                if not name.startswith("_")))  # fmt: skip


# -- the page --------------------------------------------------------------------------------------
def texts() -> dict[str, Any]:
    return tomllib.loads(TEXTS.read_text(encoding="utf-8"))


def page() -> str:
    given = texts()
    lines = ["# Reference", "", "Written by `scripts/reference.py` from the code; edit that, not"
             " this page. [design.md](design.md) fixes the contracts."]  # fmt: skip
    for part in (command_lines(), setting_lines(), json_lines(given["json"]),
                 variable_lines(given["variables"]), task_lines(given["task"])):  # fmt: skip
        lines += ["", *part]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
