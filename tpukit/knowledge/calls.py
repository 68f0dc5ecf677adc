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
class Sign:
    """What a file must hold to concern some rows; asked in this order, the quickest first."""

    word: bytes
    beside: frozenset[bytes]
    """One of these too (a keyword's functions); nothing where the word says enough."""
    forms: re.Pattern[bytes]
    """How the word must stand."""

    def is_in(self, data: bytes) -> bool:
        if self.word not in data or (self.beside and not any(b in data for b in self.beside)):
            return False
        return self.forms.search(data) is not None


@dataclass(frozen=True)
class CallTable:
    """The rows by qualified name, and what a file must hold to concern any of them."""

    by_name: Mapping[str, tuple[OldCall, ...]]
    modules: Mapping[str, OldCall]
    environment: Mapping[str, OldCall]
    lasts: frozenset[str]
    """Last parts of all names: an attribute of another name concerns no row."""
    signs: Mapping[bytes, Sequence[Sign]]
    """Package (or variable) -> what else a file that imports it (or names it) must hold."""


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
    for row in old_calls():
        for name in row.names:
            if row.kind == "environment":
                environment[name] = row
            elif row.kind == "module":
                modules[name] = row
            else:
                by_name[name] = (*by_name.get(name, ()), row)
    lasts = frozenset(name.rpartition(".")[2] for name in (*by_name, *modules))
    return CallTable(by_name, modules, environment, lasts, _all_signs())


@dataclass
class _Forms:
    """A sign as it is put together."""

    beside: set[str] = field(default_factory=set)
    forms: set[str] = field(default_factory=set)


def _all_signs() -> dict[bytes, list[Sign]]:
    signs: dict[str, dict[str, _Forms]] = {}
    for row in old_calls():
        for name in row.names:
            words = signs.setdefault(name.partition(".")[0], {})
            for word, forms in _signs(row, name).items():
                sign = words.setdefault(word, _Forms())
                sign.forms |= forms
                sign.beside |= {name.rpartition(".")[2]} if word in row.keywords else set()
    return {
        package.encode(): [
            Sign(word.encode(), frozenset(b.encode() for b in sign.beside), _pattern(sign.forms))
            for word, sign in words.items()
        ]
        for package, words in signs.items()
    }


_TELLING = 9
"""A name this long, or with an underscore inside, says enough alone; a shorter one must stand
behind its module's name, or in an import from there."""


def _signs(row: OldCall, name: str) -> dict[str, set[str]]:
    """Word -> how it must stand in a file that this name's row concerns."""
    if row.keywords:
        spawn = {"spawn": {r"\bspawn\s*\("}} if row.position is not None else {}
        return {**{keyword: {rf"\b{keyword}\s*="} for keyword in row.keywords}, **spawn}
    parent, _, last = name.rpartition(".")
    if not parent or row.kind == "module":
        return {last: {rf"\b{re.escape(last)}\b"}}
    if row.kind == "call" and len(last) >= _TELLING:
        # Called, or under another name.
        return {last: {rf"\b{last}\s*(?:\(|as\b)", rf"=\s*[\w.]*\b{last}\b"}}
    if len(last) >= _TELLING or "_" in last[1:-1]:
        return {last: {rf"\b{last}\b"}}
    return {last: _short_forms(parent, last)}


def _short_forms(parent: str, last: str) -> set[str]:
    """`module.last` under the module's usual short names, and `from module import last`."""
    module = parent.rpartition(".")[2].rstrip("()")
    is_class = module[:1].isupper()
    short = r"\w+" if is_class else r"np|th|xm|xr|nn|init"
    # Under another name it may be called anything.
    renamed = rf"\b{module}\s+as\b" if is_class else rf"\b{module}\s+as\s+(?!(?:{short})\b)"
    source = re.escape(parent)
    return {
        renamed,
        rf"\b(?:{module}|{short})(?:\(\))?\.{last}\b",
        rf"\bgetattr\([^)]*[\"']{last}\b",
        rf"\bfrom\s+{source}\s+import\b[^\n(]*\b{last}\b",
        rf"\bfrom\s+{source}\s+import\s*\((?:[^)]*\b)?{last}\b",
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
