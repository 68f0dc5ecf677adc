"""Calls that are deprecated or gone: the table, read and indexed by qualified name."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
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
    parameters: tuple[str, ...] = ()
    """The old call's parameters in their order."""
    only: tuple[str, ...] = ()
    """Those that can be carried over: with another one given, nothing is rewritten."""
    drop: tuple[str, ...] = ()
    rename: Mapping[str, str] = field(default_factory=dict)
    as_keywords: bool = False
    """Arguments given by position become keywords: the new call has another order."""
    prepend: tuple[str, ...] = ()
    append: Mapping[str, str] = field(default_factory=dict)
    """Keywords to add where they are not given."""
    module: str = ""
    member: str = ""
    special: str = ""


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
    """The rows by qualified name, and what a file must hold to concern any of them."""

    by_name: Mapping[str, tuple[OldCall, ...]]
    modules: Mapping[str, OldCall]
    environment: Mapping[str, OldCall]
    lasts: frozenset[str]
    """Last parts of all names: an attribute of another name concerns no row."""
    signs: Mapping[bytes, Sequence[tuple[bytes, re.Pattern[bytes]]]]
    """Package (or variable) -> what else a file that names it must hold: a word (quickly looked
    for), and how that must stand."""


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
    signs: dict[str, dict[str, set[str]]] = {}
    for row in old_calls():
        for name in row.names:
            if row.kind == "environment":
                environment[name] = row
            elif row.kind == "module":
                modules[name] = row
            else:
                by_name[name] = (*by_name.get(name, ()), row)
            words = signs.setdefault(name.partition(".")[0], {})
            for word, patterns in _signs(row, name).items():
                words.setdefault(word, set()).update(patterns)
    return CallTable(
        by_name,
        modules,
        environment,
        frozenset(name.rpartition(".")[2] for name in (*by_name, *modules)),
        {
            package.encode(): [(word.encode(), _pattern(forms)) for word, forms in words.items()]
            for package, words in signs.items()
        },
    )


_TELLING = 9
"""A name this long, or with an underscore inside, says enough alone; a shorter one must stand
behind its module's name, or in an import."""


def _signs(row: OldCall, name: str) -> dict[str, set[str]]:
    if row.keywords:
        spawn = {"spawn": {r"\bspawn\s*\("}} if row.position is not None else {}
        return {**{keyword: {rf"\b{keyword}\b"} for keyword in row.keywords}, **spawn}
    parent, _, last = name.rpartition(".")
    if not parent or len(last) >= _TELLING or "_" in last[1:-1]:
        return {last: {rf"\b{re.escape(last)}\b"}}
    module = parent.rpartition(".")[2].rstrip("()")
    short = r"np|th|xm|xr|nn|init" if module != "Accelerator" else r"\w+"
    # A class is imported under another name now and then; a module's usual short names are known.
    renamed = {rf"\b{module}\s+as\b"} if module[:1].isupper() else set()
    return {
        last: renamed
        | {
            rf"\b(?:{module}|{short})(?:\(\))?\.{re.escape(last)}\b",
            rf"\bimport\b[^\n]*\b{re.escape(last)}\b",
            rf"\bimport\s*\((?:[^)]*\b)?{re.escape(last)}\b",
        }
    }


def _pattern(words: set[str]) -> re.Pattern[bytes]:
    return re.compile("|".join(sorted(words)).encode())


def _row(row: Mapping[str, Any]) -> OldCall:
    fields: dict[str, Any] = {
        key: tuple(v) if isinstance(v, list) else v for key, v in row.items() if key != "fix"
    }
    raw = dict(row.get("fix", {}))
    if "import" in raw:
        raw["imports"] = raw.pop("import")
    fix: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in raw.items()}
    return OldCall(**fields, fix=Fix(**fix) if fix else None)
