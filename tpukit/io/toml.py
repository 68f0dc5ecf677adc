"""Values as TOML writes them, in a run's `config.toml` and behind `--set NAME=`."""

import datetime
import json
from collections.abc import Mapping
from typing import Any


def toml_text(value: Any) -> str:
    """A value on one line, which TOML reads as the same one; what it has no form for, as a text."""
    value = _plain(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_text, value))}]"
    if isinstance(value, Mapping):
        parts = (f"{toml_text(str(name))} = {toml_text(part)}" for name, part in value.items())
        return f"{{{', '.join(parts)}}}"
    # A JSON string is a TOML basic string, but for its surrogate pairs.
    return json.dumps(str(value), ensure_ascii=False)


def has_form(value: Any) -> bool:
    """Whether TOML has a form for a value and for all that it holds."""
    value = _plain(value)
    if isinstance(value, Mapping):
        return all(isinstance(name, str) and has_form(part) for name, part in value.items())
    if isinstance(value, list | tuple):
        return all(map(has_form, value))
    return isinstance(value, int | float | str | datetime.date | datetime.time)


def _plain(value: Any) -> Any:
    """NumPy's numbers as Python's."""
    return value.item() if getattr(value, "ndim", None) == 0 else value
