"""Environment variables that may be shown, and values that bite."""

from __future__ import annotations

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
    """A variable and the values of it that bite."""

    name: str
    status: str
    says: str
    fix: str
    when: str = ""
    """A regular expression for the whole value; empty: any value but one that says no."""

    def bites(self, value: str) -> bool:
        if self.when:
            return re.fullmatch(self.when, value) is not None
        return value not in _OFF


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(_TABLE.read_text(encoding="utf-8"))


def allowed(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that a report may show: a list of names, so that no secret can slip in."""
    return {name: environment[name] for name in _table()["allowed"] if name in environment}


def biting(environment: Mapping[str, str]) -> list[Variable]:
    """The variables of this environment whose values bite."""
    rows = (Variable(**row) for row in _table()["variable"])
    return [row for row in rows if row.name in environment and row.bites(environment[row.name])]
