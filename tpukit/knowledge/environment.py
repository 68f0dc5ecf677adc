"""Environment variables that a report may show, and values that cause problems."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_TABLE = Path(__file__).parent / "tables" / "environment.toml"
_OFF = ("", "0", "false", "False", "no")


@dataclass(frozen=True)
class Variable:
    """A variable and the values of it that cause problems."""

    name: str
    message: str
    fix: str
    when: str = ""
    """A regular expression for the whole value; empty: any value except those in `_OFF`."""

    def applies_to(self, value: str) -> bool:
        if self.when:
            return re.fullmatch(self.when, value) is not None
        return value not in _OFF


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(_TABLE.read_text(encoding="utf-8"))


def allowed(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that a report may show: a list of names, so that no secret can slip in."""
    return {name: environment[name] for name in _table()["allowed"] if name in environment}


def problematic(environment: Mapping[str, str]) -> list[Variable]:
    """The rows whose variable has such a value in this environment."""
    rows = (Variable(**row) for row in _table()["variable"])
    return [
        row for row in rows if row.name in environment and row.applies_to(environment[row.name])
    ]
