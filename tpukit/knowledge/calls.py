"""The table of removed and deprecated calls, indexed by qualified name."""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

CallStatus = Literal["removed", "deprecated", "habit"]
CallKind = Literal["name", "call", "module", "attribute", "environment", "shell", "form"]
_EFFECTS = {"removed": "raises", "deprecated": "warns"}
_TABLE = Path(__file__).parent / "tables" / "calls.toml"
LEFT = "torch_xla"
"""The package that code moves away from."""


@dataclass(frozen=True)
class Fix:
    """The one right replacement, where there is one (see the head of `tables/calls.toml`)."""

    to: str = ""
    imports: str = ""
    arguments: Literal["keep", "drop"] = "keep"
    parameters: tuple[str, ...] = ()
    """The old call's parameters in their order."""
    only: tuple[str, ...] = ()
    """Those that the new call takes too: with another one given, nothing is rewritten."""
    drop: tuple[str, ...] = ()
    rename: Mapping[str, str] = field(default_factory=dict)
    as_keywords: bool = False
    """Arguments given by position become keywords: the new call has another order."""
    prepend: tuple[str, ...] = ()
    append: Mapping[str, str] = field(default_factory=dict)
    """Keywords to add where they are not given."""
    module: str = ""
    member: str = ""
    call: str = ""
    """What to write in the call's place; of {call}, of an argument by its name, of {held} (what the
    method is called on; {held.} with the dot) the text stays, {rest} are the elements of `args`."""
    use: str = ""
    """What to write in place of the name alone."""
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
    effect: str = ""
    """What happens; by default a removed call raises and a deprecated one warns."""
    keywords: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    positional: int = 0
    position: int | None = None
    """Index of the first of `keywords` when it is passed by position."""
    unless: Mapping[str, list[str]] = field(default_factory=dict)
    texts: bool = False
    """The argument at `position` counts where it is a text only."""
    pattern: str = ""
    """What a shell line shows, as a regular expression."""
    remark: str = ""
    """What a rewrite leaves to do."""
    instead: Mapping[str, str] = field(default_factory=dict)
    """What replaces one of several names (by its last part) or keywords, where `new` does not."""
    signs: tuple[str, ...] = ()
    """Regular expressions for the forms in which a file shows the last name of `names`."""
    fix: Fix | None = None


@dataclass(frozen=True)
class CallTable:
    """The rows by qualified name."""

    by_name: Mapping[str, tuple[OldCall, ...]]
    modules: Mapping[str, OldCall]
    environment: Mapping[str, OldCall]
    shell: tuple[tuple[re.Pattern[str], OldCall], ...]
    by_form: Mapping[str, OldCall]
    """Row's id -> row, for forms that no name shows."""
    forms: tuple[re.Pattern[str], ...]
    """One of which the text of a module with such a form shows."""
    moves: frozenset[str]
    """Ids of the rows about another device."""
    lasts: frozenset[str]
    """Last parts of all names: an attribute with another name matches no row."""


@cache
def old_calls() -> tuple[OldCall, ...]:
    """Every row."""
    rows = tomllib.loads(_TABLE.read_text(encoding="utf-8"))
    return tuple(_row(id, row) for id, row in rows.items() if id != "successor")


@cache
def moves_to_torch_tpu() -> tuple[OldCall, ...]:
    """What torch_tpu has instead of torch_xla's names."""
    return _moves("torch_tpu", effect="not in torch_tpu", since="torch_tpu 0.2")


def _moves(target: str, **defaults: str) -> tuple[OldCall, ...]:
    text = _TABLE.with_name(f"moves_{target}.toml").read_text(encoding="utf-8")
    rows = tomllib.loads(text).items()
    return tuple(_row(id, {"status": "removed", **defaults, **row}) for id, row in rows)


@dataclass(frozen=True)
class Successor:
    """What replaces torch_xla."""

    package: str
    last_release: str
    words: str
    source: str


@cache
def successor() -> Successor:
    return Successor(**tomllib.loads(_TABLE.read_text(encoding="utf-8"))["successor"])


@cache
def name_group(group: str) -> frozenset[str]:
    """Names that a rule takes for one another: `[names]` of rules.toml."""
    return frozenset(rule_data("names")[group])


@cache
def rule_data(section: str) -> Any:
    """A section of rules.toml, whose head says what it holds."""
    return tomllib.loads(_TABLE.with_name("rules.toml").read_text(encoding="utf-8"))[section]


@cache
def call_table() -> CallTable:
    """The rows, indexed."""
    return _indexed(old_calls())


@cache
def move_table(target: str) -> CallTable:
    """The rows for code that moves from torch_xla to torch_tpu, or from CUDA to torch_xla
    (`tpu`), indexed."""
    if target == "tpu":
        moves = _moves("tpu", effect="not on a TPU", since="torch_xla 2.9")
        taken = {name for row in moves if not (row.keywords or row.lacks) for name in row.names}
        kept = (row for row in old_calls() if taken.isdisjoint(row.names))
        return _indexed((*kept, *moves), frozenset(row.id for row in moves))
    about_others = (row for row in old_calls() if not _is_left(row))
    return _indexed((*about_others, *moves_to_torch_tpu()))


def _is_left(row: OldCall) -> bool:
    """Whether a row is about the package that code moves away from, or its variables."""
    roots = {name.partition(".")[0] for name in row.names}
    return LEFT in roots or row.kind in ("environment", "shell")


def _indexed(rows: Sequence[OldCall], moves: frozenset[str] = frozenset()) -> CallTable:
    by_name: dict[str, tuple[OldCall, ...]] = {}
    modules: dict[str, OldCall] = {}
    environment: dict[str, OldCall] = {}
    shell = tuple((re.compile(row.pattern), row) for row in rows if row.kind == "shell")
    for row in rows:
        for name in row.names:
            if row.kind == "environment":
                environment[name] = row
            elif row.kind == "module":
                modules[name] = row
            elif row.kind not in ("shell", "form"):
                by_name[name] = (*by_name.get(name, ()), row)
    lasts = frozenset(name.rpartition(".")[2] for name in (*by_name, *modules))
    by_form = {row.id: row for row in rows if row.kind == "form"}
    forms = tuple(re.compile(sign) for row in by_form.values() for sign in row.signs)
    return CallTable(by_name, modules, environment, shell, by_form, forms, moves, lasts)


def _row(id: str, row: Mapping[str, Any]) -> OldCall:
    fields: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in row.items()}
    for status in get_args(CallStatus):
        if status in fields:
            fields |= {"status": status, "since": fields.pop(status)}
    if fix := fields.pop("fix", None):
        fix = {key: tuple(v) if isinstance(v, list) else v for key, v in fix.items()}
        fields["fix"] = Fix(imports=fix.pop("import", ""), **fix)
    usual = {"kind": _kind(fields), "effect": _EFFECTS.get(fields["status"], "")}
    return OldCall(**{"id": id, "old": fields["names"][0], **usual, **fields})


def _kind(fields: Mapping[str, Any]) -> CallKind:
    """What a row is about where it does not say so, by what it asks for."""
    if "pattern" in fields:
        return "shell"
    if "signs" in fields:
        return "form"
    if not fields.keys().isdisjoint(("keywords", "lacks", "positional")):
        return "call"
    return "environment" if fields["names"][0].isupper() else "name"
