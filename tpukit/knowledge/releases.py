"""What the releases of libraries lost and gained, and which library a class belongs to."""

import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tpukit.knowledge.calls import old_calls

_TABLES = Path(__file__).parent / "tables"
_BASES = r"PreTrained\w*|\w*Base|\w*Mixin"
"""Classes whose attributes many others have."""
_KIND = re.compile(
    r"(Trainer|Cache|Backend|Method|Worker|Manager|Connector|Runner|Scheduler|Executor|Engine|Loader|Impl"
    r"|Builder|Metadata|Kernel|Strategy|Callback|Handler|Platform|Adapter)$"
)
"""The last word of a class's name, which its base class often shares."""


@cache
def libraries() -> dict[str, dict[str, Any]]:
    """What logs need of a library beside the names of its releases, by the name that is imported;
    the table's head names the fields."""
    return tomllib.loads((_TABLES / "libraries.toml").read_text(encoding="utf-8"))


def owner(name: str, asking: Iterable[str] = ()) -> str:
    """The library that defines a class (`SFTTrainer`) or a method (`SFTTrainer.__init__`), before
    others one of the packages `asking` for it; empty where its name does not tell."""
    first = name.partition(".")[0] or " "
    fits = [lib for lib, row in libraries().items() if re.fullmatch(row.get("classes", ""), first)]
    own = re.compile(rf" {re.escape(first)}(?![\w>])")
    near = (of for of in asking if of in fits or any(own.search(row[2]) for row in _history(of)))
    return next(near, next(iter(fits), ""))


def releases_in(text: str) -> Iterator[tuple[str, str]]:
    """(library, release) of each that a line names: `Transformers: 4.57.3`, `torch==2.9.0`."""
    for match in _release_form().finditer(text):
        yield match[1].lower().replace("-", "_"), match[2]


@cache
def _release_form() -> re.Pattern[str]:
    names = "|".join(libraries()).replace("_", "[_-]")
    between = r"(?:[ '\"`_-]*version)?[ :='\"`@v-]{1,6}"
    return re.compile(rf"\b({names}){between}(\d+\.\d+(?:\.\w+){{0,2}})", re.IGNORECASE)


@dataclass(frozen=True)
class Lost:
    """A name that a library's release has no more, or that an older one does not have yet."""

    words: str
    """In which release it went or came."""
    new: str
    """What to write instead; may be empty."""
    library: str = ""
    range: str = ""
    """Releases that have it, as pip takes them: `<5.0`."""


def lost_name(place: str, name: str, release: str = "") -> Lost | None:
    """What is known of a name that `place`, a module, a class or its method, does not have.

    The table of calls knows a few with their successors, the tables of releases the others.
    `release` is the one that lacks it, where the log names it.
    """
    last = place.removesuffix(".__init__").rpartition(".")[2]
    of_keyword = None
    for row in old_calls():
        # Of a row of several names the releases' tables know more.
        if row.status != "removed" or ", " in row.new or (row.instead and not row.keywords):
            continue
        if row.keywords:
            is_it = name in row.keywords and any(q.endswith(f".{last}") for q in row.names)
        else:
            whole, ending = f"{place}.{name}", f".{last}.{name}"
            is_it = any(q == whole or q.replace("()", "").endswith(ending) for q in row.names)
        if is_it:
            found = Lost(f"{row.since} has it no more", row.instead.get(name, row.new))
            if not row.keywords:
                return found
            # A row of several keywords says less than a release's table.
            of_keyword = of_keyword or found
    return _lost_in_releases(place, name, release) or of_keyword


def _lost_in_releases(place: str, name: str, release: str) -> Lost | None:
    """What the tables of releases know of it."""
    place = place.removesuffix(".__init__")
    library = place.partition(".")[0]
    groups = [[library]] if _history(library) else [[owner(place)], libraries()]
    for where, token in _forms(place, name):
        for of_libraries in groups:
            changes = [c for of in of_libraries for c in _changes(of, where, token, name, release)]
            if changes:
                return changes[0] if len({change.library for change in changes}) == 1 else None
    return None


def _changes(library: str, where: str, token: str, name: str, release: str) -> Iterator[Lost]:
    """What a library's table says of a name."""
    last = name.rpartition(".")[2]
    for sign, number, names in _history(library):
        found = last in names and _found(where, token, last, names)
        # A short name, or a base class's, that came later was perhaps added to another class only.
        whole = names[names.rfind(" ", 0, found.start()) + 1 : found.start()] if found else ""
        is_short = re.fullmatch(rf".*\.[a-z]{{1,8}}|(?:{_BASES})\..*", whole + last)
        is_weak = sign == ">=" and not release and is_short
        if found and not is_weak and not (release and (sign == "<") != _is_since(release, number)):
            new = libraries().get(library, {}).get("new", {}).get(name) or found[1] or ""
            said = (
                f"{library} {number} has it no more" if sign == "<" else f"since {library} {number}"
            )
            yield Lost(said, new, library, sign + number)


def _found(where: str, token: str, last: str, names: str) -> re.Match[str] | None:
    """The `last` part of a name in the names by module (the text is long: no search by line)."""
    for match in re.finditer(rf"{re.escape(last)}(?:>(\S+))?(?= |$)", names, re.MULTILINE):
        start = names.rfind(" ", 0, match.start()) + 1
        line = names.rfind("\n", 0, start) + 1
        is_it = re.fullmatch(token, names[start : match.start() + len(last)])
        if is_it and re.compile(f"{where}: ").match(names, line):
            return match
    return None


def _forms(place: str, name: str) -> Iterator[tuple[str, str]]:
    """Expressions for a line's module and for the name in it."""
    parts = f"{place}.{name}".split(".")
    if not _history(parts[0]):
        yield r"\S*", re.escape(f"{place}.{name}")
        # A plug-in's class derives from one of that kind: AiterBackend from AttentionBackend.
        kind = _KIND.search(place)
        bases = rf"{_BASES}|\w*{kind[1]}(?:Base)?" if kind and "_" in name else _BASES
        bases += "|TrainingArguments" * place.endswith("Config")
        if place[:1].isupper():
            yield r"\S*", rf"(?:{bases})\.{re.escape(name)}"
        return
    for end in range(len(parts) - 1, 0 if "." in name else len(parts) - 2, -1):
        yield re.escape(".".join(parts[:end])), re.escape(parts[end])
    if "." not in name:
        yield re.escape(parts[0]), re.escape(name)


def _is_since(release: str, number: str) -> bool:
    """Whether a release is at least another."""
    first, second = ([int(n) for n in re.findall(r"\d+", text)] for text in (release, number))
    return first[: len(second)] >= second


@cache
def _history(library: str) -> list[tuple[str, str, str]]:
    """(`<` removed or `>=` added, release, names by module); empty where no table knows it."""
    path = _TABLES / "releases" / f"{library}.toml"
    if not library or not path.is_file():
        return []
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    return [
        (sign, number, row["names"])
        for kind, sign in (("removed", "<"), ("added", ">="))
        for number, row in table.get(kind, {}).items()
    ]
