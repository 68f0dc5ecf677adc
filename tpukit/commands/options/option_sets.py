"""Options that several commands share, kept as dataclasses and unfolded into a signature."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast, get_type_hints

Command = TypeVar("Command", bound=Callable[..., Any])


def with_option_sets(command: Command) -> Command:
    """Lets parameters annotated with a dataclass of options stand for its fields.

    Typer sees one flat signature; the command is called with the dataclasses built.
    """
    hints = get_type_hints(command, include_extras=True)
    sets: dict[str, Any] = {n: h for n, h in hints.items() if dataclasses.is_dataclass(h)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in sets:
            parameters += _field_parameters(sets[name])
        else:
            parameters.append(parameter.replace(annotation=hints[name]))

    @functools.wraps(command)
    def flat(**values: Any) -> Any:
        built = {
            name: options(**{f.name: values.pop(f.name) for f in dataclasses.fields(options)})
            for name, options in sets.items()
        }
        return command(**built, **values)

    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {p.name: p.annotation for p in parameters}
    # Typer would otherwise read the signature of the wrapped command.
    del flat.__wrapped__
    return cast(Command, flat)


def _field_parameters(options: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(options, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=hints[field.name],
        )
        for field in dataclasses.fields(options)
    ]
