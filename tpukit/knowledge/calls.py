"""Calls that are deprecated or gone: the table, read and indexed by qualified name."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

CallStatus = Literal["removed", "deprecated", "habit"]
CallKind = Literal["name", "call", "module", "attribute", "environment"]
_TABLE = Path(__file__).parent / "tables" / "calls.toml"


@dataclass(frozen=True)
class Fix:
    """The one right replacement, where there is one (see the head of `tables/calls.toml`)."""

    to: str = ""
    imports: str = ""
    arguments: Literal["keep", "drop"] = "keep"
    prepend: tuple[str, ...] = ()
    append: Mapping[str, str] = field(default_factory=dict)
    drop: tuple[str, ...] = ()
    drop_position: int | None = None
    only: tuple[str, ...] = ()
    """Parameters, in their order, that can be carried over: another one, and nothing is fixed."""
    rename: Mapping[str, str] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    """Names for the positional arguments, which become keywords."""
    module: str = ""
    member: str = ""
    keyword: Mapping[str, str] = field(default_factory=dict)
    special: str = ""
    attribute: str = ""


@dataclass(frozen=True)
class OldCall:
    """One row of the table."""

    id: str
    names: tuple[str, ...]
    kind: CallKind
    old: str
    new: str
    since: str
    status: CallStatus
    keywords: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    positional: int = 0
    position: int | None = None
    """Where the first of `keywords` stands when it is given without its name."""
    unless: Mapping[str, list[str]] = field(default_factory=dict)
    fix: Fix | None = None


@dataclass(frozen=True)
class CallTable:
    """The rows by qualified name, and words that a file must hold to concern any of them."""

    by_name: Mapping[str, tuple[OldCall, ...]]
    modules: Mapping[str, OldCall]
    environment: Mapping[str, OldCall]
    words: tuple[bytes, ...]
    packages: tuple[bytes, ...]


@cache
def old_calls() -> tuple[OldCall, ...]:
    """Every row."""
    rows = tomllib.loads(_TABLE.read_text(encoding="utf-8"))["call"]
    return tuple(_row(row) for row in rows)


@cache
def call_table() -> CallTable:
    """The rows, indexed."""
    by_name: dict[str, tuple[OldCall, ...]] = {}
    modules: dict[str, OldCall] = {}
    environment: dict[str, OldCall] = {}
    words, packages = set[str](), set[str]()
    for row in old_calls():
        for name in row.names:
            if row.kind == "environment":
                environment[name] = row
            elif row.kind == "module":
                modules[name] = row
            else:
                by_name[name] = (*by_name.get(name, ()), row)
            words.update(row.keywords or (name.rpartition(".")[2],))
            packages.add(name.partition(".")[0])
    return CallTable(by_name, modules, environment, _encoded(words), _encoded(packages))


def _encoded(words: set[str]) -> tuple[bytes, ...]:
    return tuple(word.encode() for word in sorted(words))


def _row(row: Mapping[str, Any]) -> OldCall:
    fields = {key: tuple(v) if isinstance(v, list) else v for key, v in row.items() if key != "fix"}
    raw = dict(row.get("fix", {}))
    if "import" in raw:
        raw["imports"] = raw.pop("import")
    fix = {key: tuple(v) if isinstance(v, list) else v for key, v in raw.items()}
    return OldCall(**fields, fix=Fix(**fix) if fix else None)
