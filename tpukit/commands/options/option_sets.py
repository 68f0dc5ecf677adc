"""Options that several commands share: dataclasses unfolded into a command's signature."""

import dataclasses
import functools
import inspect
import tomllib
from collections.abc import Callable, Mapping, Sequence
from enum import EnumType
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

import typer

from tpukit.errors import ConfigError
from tpukit.io.ranges import flag, flags, range_problems
from tpukit.io.units import parse_bytes, parse_duration
from tpukit.registry.declared import source_of

Command = TypeVar("Command", bound=Callable[..., Any])
Given = dict[str, Any]
"""Options by field name; those that were not given are left out."""

PLAIN_TYPES = (bool, int, float, str, Path)
UNITS: Mapping[str, Callable[[str], Any]] = {"DURATION": parse_duration, "SIZE": parse_bytes}
"""Units of fields, as `--help` shows their values, and what reads these."""


@dataclasses.dataclass(frozen=True, eq=False)
class OptionSet:
    """Parameters of a command that stand for fields of a config; see `options_of`."""

    parameters: Sequence[inspect.Parameter] = ()
    takes_own: bool = False
    """Whether the options of the task that the command line names belong to it."""
    read: Callable[[Given], Any] | None = None
    """What the command receives of what was given; None: a dict, or the annotated dataclass."""


OwnOptions = Annotated[Given, OptionSet(takes_own=True)]
"""The parameter of a command that receives the options of a task."""


def options_of(config: type, panels: Mapping[Any, Sequence[str]] | None = None) -> OptionSet:
    """Typer options for some fields of a config dataclass, by the panels that `--help` shows.

    Without `panels` for all, in the panel of every option.

    Name, type, default and help are the field's: its docstring is the help text, followed by the
    default where the docstring does not speak of one. Annotate a parameter of a command decorated
    with `with_option_sets`; it receives a dict of what was given, for `build` or `resolve`:

        given: Annotated[Given, options_of(TrainConfig, {"Hardware": ("hw", "devices")})]
    """
    hints, docs = get_type_hints(config), field_docs(config)
    fields = {field.name: field for field in dataclasses.fields(config)}
    return OptionSet([
        option_parameter(name, hints[name], help_text(docs[name], field.default), field.default,
                         panel, field.metadata)
        for panel, names in (panels or {None: [*fields]}).items()
        for name, field in ((name, fields[name]) for name in names)
    ])  # fmt: skip


def field_docs(config: type) -> dict[str, str]:
    """The docstring that follows each field of a dataclass, its bases' included, in one line."""
    return {field.name: field.text for field in source_of(config).fields()}


def help_text(doc: str, default: Any) -> str:
    """A docstring as the help of an option, with its default where it does not name one."""
    if default is None or isinstance(default, bool) or "default" in doc:
        return doc
    return f"{doc.removesuffix('.')} (default: {default})."


def option_parameter(
    name: str,
    hint: Any,
    text: str,
    default: Any,
    panel: str | None,
    facts: Mapping[str, Any] = MappingProxyType({}),
) -> inspect.Parameter:
    """A parameter that typer reads as the option of a field; its value is None if not given.

    facts: the field's metadata; see `setting`.
    """
    hint = next((part for part in _parts(hint) if part is not type(None)), hint)
    metavar = facts.get("unit")
    parser, kind = UNITS.get(metavar or ""), cast(Any, str)
    if get_origin(hint) is Literal:
        metavar = "|".join(map(str, get_args(hint)))
    elif hint in PLAIN_TYPES or get_origin(hint) is list or isinstance(hint, EnumType):
        kind, metavar = hint, metavar or facts.get("metavar")
    else:
        parser, metavar = read_value, "VALUE"
    names = flags(name)
    if kind is bool and default is not False:
        names = (f"{flag(name)}/{flag(f'no-{name}')}",)
    if parser is not None:
        parser = _naming(names[0], parser)
    option = typer.Option(*names, rich_help_panel=panel, help=text, parser=parser, metavar=metavar)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, option],
    )


def _parts(hint: Any) -> tuple[Any, ...]:
    """The members of a union; of another type itself."""
    return (hint,) if get_origin(hint) is Literal else get_args(hint) or (hint,)


def read_value(text: str) -> Any:
    """A value as in TOML, a boolean as in Python, else text."""
    text = text.lower() if text in ("True", "False") else text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):  # not TOML, or beyond what Python reads of it
        return text


def _naming(option: str, parser: Callable[[str], Any]) -> Callable[[str], Any]:
    """The parser, its errors beginning with the option."""

    def parse(text: str) -> Any:
        try:
            return parser(text)
        except ConfigError as error:
            raise ConfigError(f"{option}: {error.message}", error.hint) from error

    return parse


def with_option_sets(command: Command, own: Sequence[inspect.Parameter] = ()) -> Command:
    """Lets a parameter that is annotated with `options_of` stand for several options.

    It receives what was given, as a dict or built as the dataclass that it is annotated with. Typer
    sees one flat signature.

    own: the options that a task declares, known when a command line is read, for the set that
        takes them. Those whose name the command has already are left out.
    """
    hints = get_type_hints(command, include_extras=True)
    sets = {name: found for name, hint in hints.items() if (found := _option_set(hint))}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in sets:
            parameters += sets[name].parameters
        else:
            parameters.append(parameter.replace(annotation=hints[name]))
    taken = {parameter.name for parameter in parameters}
    own = [parameter for parameter in own if parameter.name not in taken]
    parameters += own

    @functools.wraps(command)
    def flat(**values: Any) -> Any:
        for name, options in sets.items():
            members = [*options.parameters, *(own if options.takes_own else ())]
            given = {p.name: values.pop(p.name) for p in members}
            given = {n: v for n, v in given.items() if v is not None}
            kind = get_args(hints[name])[0]
            if options.read is not None:
                values[name] = options.read(given)
            else:
                values[name] = _built(kind, given) if dataclasses.is_dataclass(kind) else given
        return command(**values)

    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {p.name: p.annotation for p in parameters}
    # Typer would otherwise read the signature of the wrapped command.
    del flat.__wrapped__
    return cast(Command, flat)


def _built(kind: Any, given: Given) -> Any:
    """The dataclass of what was given. Raises ConfigError for a number out of its range."""
    built = kind(**given)
    if problems := range_problems(built):
        raise ConfigError(" ".join(problems))
    return built


def _option_set(hint: Any) -> OptionSet | None:
    found = [part for part in getattr(hint, "__metadata__", ()) if isinstance(part, OptionSet)]
    return found[0] if found else None
