"""What the releases of libraries lost and gained, and which library a class belongs to."""

import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

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
    near = (of for of in asking if of in fits or _history(of).knows(first))
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
            new = row.new.replace(f"{row.keywords[0]}=", f"{name}=") if row.keywords else row.new
            found = Lost(f"{row.since} has it no more", row.instead.get(name, new))
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
    """What a library's table says of a name: what it lost first, the newest release first."""
    last = name.rpartition(".")[2]
    history = _history(library)
    found = [c for c in history.of(last) if re.fullmatch(where, c.module)]
    found = [change for change in found if re.fullmatch(token, change.name)]
    for change in sorted(found, key=lambda c: (c.sign, [-n for n in _numbers(c.release)])):
        # A short name, or a base class's, that came later was perhaps added to another class only.
        is_short = re.fullmatch(rf".*\.[a-z]{{1,8}}|(?:{_BASES})\..*", change.name)
        if change.sign == ">=" and not release and is_short:
            continue
        if release and (change.sign == "<") != _is_since(release, change.release):
            continue
        new = libraries().get(library, {}).get("new", {}).get(name) or change.new
        is_gone = change.sign == "<"
        number = change.release
        said = f"{library} {number} has it no more" if is_gone else f"since {library} {number}"
        bound = history.first_unknown(number) if is_gone else number
        yield Lost(said, new, library, change.sign + bound)


def _forms(place: str, name: str) -> Iterator[tuple[str, str]]:
    """Expressions for a line's module and for the name in it."""
    parts = f"{place}.{name}".split(".")
    if not _history(parts[0]):
        yield r"\S*", re.escape(f"{place}.{name}")
        # A plug-in's class derives from one of that kind: AiterBackend from AttentionBackend.
        kind = _KIND.search(place)
        bases = rf"{_BASES}|\w*{kind[1]}(?:Base)?" if kind and "_" in name else _BASES
        if place.endswith("Config"):
            bases = "Pre[Tt]rainedConfig|TrainingArguments"
        if place[:1].isupper():
            yield r"\S*", rf"(?:{bases})\.{re.escape(name)}"
        return
    for end in range(len(parts) - 1, 0 if "." in name else len(parts) - 2, -1):
        yield re.escape(".".join(parts[:end])), re.escape(parts[end])
    if "." not in name:
        yield re.escape(parts[0]), re.escape(name)


def _is_since(release: str, number: str) -> bool:
    """Whether a release is at least another."""
    first, second = _numbers(release), _numbers(number)
    return first[: len(second)] >= second


def _numbers(release: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", release)]


class _Change(NamedTuple):
    """One name of a table of releases."""

    module: str
    name: str
    new: str
    sign: str
    """`<` lost, `>=` gained."""
    release: str
    """The first that lacks it, or that has it."""


@dataclass(frozen=True)
class _History:
    """The table of a library's releases, whose form scripts/compare_releases.py explains."""

    names: str = ""
    skipped: Sequence[str] = ()
    compared: Sequence[str] = ()

    def __bool__(self) -> bool:
        return bool(self.names)

    def knows(self, name: str) -> bool:
        """Whether it has a class or a function, or what belongs to it."""
        is_named = re.search(rf" {re.escape(name)}(?![\w>*])", self.names) is not None
        return is_named or any(fnmatchcase(name, form.name) for form in self._lines_with("*"))

    def of(self, last: str) -> Iterator[_Change]:
        """The names that are `last`, or end in it behind a class or a function; where none of them
        went, or came later, what went by its form."""
        named = [c for c in self._lines_with(last) if c.name.rpartition(".")[2] == last]
        yield from named
        for form in self._lines_with("*"):
            others = (c.sign == "<" or _is_since(c.release, form.release) for c in named)
            if fnmatchcase(last, form.name) and not any(others):
                yield form._replace(name=last)

    def _lines_with(self, text: str) -> Iterator[_Change]:
        """The names of the lines that contain a text."""
        for line in self.names.splitlines() if text in self.names else ():
            module, _, words = line.partition(": ")
            sign = release = ""
            for word in words.split() if text in words else ():
                if bound := re.match(r"(<|>=)(\d.*)", word):
                    sign, release = bound.groups()
                    continue
                name, _, new = word.partition(">")
                yield _Change(module, name, new, sign, release)

    def first_unknown(self, release: str) -> str:
        """The first release of which it is not known that it has what this one lacks."""
        of = list(self.compared)
        before = _numbers(of[of.index(release) - 1]) if release in of[1:] else _numbers(release)
        between = (n for n in self.skipped if before < _numbers(n) < _numbers(release))
        return next(between, release)


@cache
def _history(library: str) -> _History:
    """What a library's releases lost and gained; empty where no table knows it."""
    path = _TABLES / "releases" / f"{library}.toml"
    if not library or not path.is_file():
        return _History()
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    return _History(unfolded(table["names"]), table.get("skipped", ()), table.get("compared", ()))


def unfolded(names: str) -> str:
    """The names of a table, each written out: `GLM|Config|Model X.size .shape move>new.place.` are
    `GLMConfig GLMModel X.size X.shape move>new.place.move`."""
    lines = (line.partition(": ") for line in names.splitlines())
    return "\n".join(f"{module}: {' '.join(_unfolded(words))}" for module, _, words in lines)


def _unfolded(words: str) -> Iterator[str]:
    owner = ""
    for word in words.split():
        if word[0] in "<>":
            yield word
        elif "|" in word:
            stem, *ends = word.split("|")
            yield from (f"{stem}{end}" for end in ends)
        else:
            name, moved, new = word.partition(">")
            name = f"{owner}{name}" if name[0] == "." else name
            owner, _, last = name.rpartition(".")
            yield f"{name}{moved}{new}{last if new.endswith('.') else ''}"
