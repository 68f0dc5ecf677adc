"""The table of known error texts: its entries, read and checked, with a user's own files."""

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_origin, get_type_hints

from tpukit.errors import DataError

Role = Literal["cause", "consequence", "warning", "harmless"]
ROLES: tuple[Role, ...] = ("cause", "consequence", "warning", "harmless")
QUOTES = "\"'`‘’“”´"
PLACEHOLDER = re.compile(r"<(n|w|\*)(?::(\w+))?>")
"""A varying part of a `match` text: `<n>` a number with its unit, `<w>` one name, path or address,
`<*>` anything short; `<n:used>` captures it as `used`."""
_TABLES = Path(__file__).parent / "tables" / "errors"
_UNKNOWN = _TABLES.with_name("unknown_errors.toml")
_FORMS = _TABLES.with_name("line_forms.toml")
_SHORTEST_FIXED = 4
_ALTERNATIVES = re.compile(r"\b(?:or|mostly|often|usually|sometimes|rarely|perhaps)\b")
_EXAMPLE = (
    'An entry: [[error]], id = "my-error", match = ["the text with <n> for numbers"], '
    'cause = "...", fix = "...".'
)


@dataclass(frozen=True)
class KnownError:
    """One known error, in the forms in which it is printed."""

    id: str
    cause: str
    fix: str
    source: str = ""
    topic: str = ""
    role: Role = "cause"
    match: tuple[str, ...] = ()
    """Texts with placeholders, the most specific first."""
    regex: tuple[re.Pattern[str], ...] = ()
    """Regular expressions for one cleaned line."""
    hints: tuple[str, ...] = ()
    """One of these is in every line that a regular expression matches."""
    needs: tuple[str, ...] = ()
    """One of these must stand nearby: the text alone is ambiguous."""
    below: tuple[str, ...] = ()
    """Ids of more specific entries: found nearby, or by the exception, they replace this one."""
    exception: tuple[str, ...] = ()
    """Classes of exceptions (without their module; `*` for any) that this entry explains where no
    text is known. The groups of `message` fill `{name}` in `cause` and `fix`."""
    message: tuple[re.Pattern[str], ...] = ()
    """One of these must be found in the exception's message."""
    frames: tuple[str, ...] = ()
    """One of these must stand in a path or a line of its traceback."""
    last_resort: tuple[re.Pattern[str], ...] = ()
    """Like `regex`, for a text that names the cause only where the log names no other."""
    place: str = ""
    """The module whose history knows the captured `name`."""
    inferred: bool = False
    """The cause was inferred from code; no authoritative source states it."""

    @property
    def is_certain(self) -> bool:
        """Whether a text of this entry has one cause: its sentence names no alternatives."""
        return not self.inferred and _ALTERNATIVES.search(self.cause) is None


_KINDS = {bool: bool, tuple: list}
_FIELDS = {
    name: _KINDS.get(get_origin(hint) or hint, str)
    for name, hint in get_type_hints(KnownError).items()
}
"""Type that a file has for each field."""


@cache
def known_errors() -> tuple[KnownError, ...]:
    """The entries that come with the package."""
    return tuple(read_known_errors([]))


def unknown_errors() -> list[KnownError]:
    """What is said where no entry matches, in the order of the file."""
    rows = tomllib.loads(_UNKNOWN.read_text(encoding="utf-8"))
    return [KnownError(**row) for row in rows.values()]


@cache
def line_forms() -> dict[str, Any]:
    """The forms of frames and of failures that name no class; the table's head explains them."""
    return tomllib.loads(_FORMS.read_text(encoding="utf-8"))


def line_words(name: str) -> str:
    """The alternatives of one of that table's expressions."""
    return "|".join(line_forms()["words"][name])


def read_known_errors(own_files: Sequence[Path]) -> list[KnownError]:
    """The package's entries and a user's own, which replace those of the same id.

    Raises DataError naming file, entry and field.
    """
    entries: dict[str, KnownError] = {}
    tables = sorted(_TABLES.glob("*.toml"), key=lambda path: (path.stem == "python", path))
    for path in [*tables, *own_files]:
        for entry in _read_file(path):
            entries[entry.id] = entry
    return list(entries.values())


def fixed_parts(text: str) -> list[str]:
    """The fixed characters of a `match` text between placeholders and quotes, without spaces."""
    return ["".join(s.split()) for s in re.split(f"[\0{QUOTES}]", PLACEHOLDER.sub("\0", text))]


def _read_file(path: Path) -> list[KnownError]:
    try:
        with path.open("rb") as file:
            tables = tomllib.load(file)
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror or error})", "Name a TOML file with entries."
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{path}: invalid TOML: {error}", _EXAMPLE) from None
    raw = tables.get("error")
    if raw is None:
        # The package's own tables name each entry by its id; what stands above holds for all.
        of_all = {name: value for name, value in tables.items() if not isinstance(value, dict)}
        raw = [{"id": id, **of_all, **row} for id, row in tables.items() if id not in of_all]
    if not raw or not isinstance(raw, list) or not all(isinstance(table, dict) for table in raw):
        raise DataError(f"{path}: no [[error]] entries", _EXAMPLE)
    return [_entry(table, f"{path}, entry {i}") for i, table in enumerate(raw, start=1)]


def _entry(table: dict[str, Any], where: str) -> KnownError:
    _check_fields(table, where)
    for text in table.get("match", ()):
        if len(max(fixed_parts(text), key=len)) < _SHORTEST_FIXED:
            raise DataError(
                f"{where}: `match` needs a fixed word of at least {_SHORTEST_FIXED} letters",
                _EXAMPLE,
            )
    fields: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in table.items()
    }
    for name in ("regex", "message", "last_resort"):
        try:
            fields[name] = tuple(re.compile(text) for text in table.get(name, ()))
        except (re.error, RecursionError, OverflowError) as error:
            raise DataError(
                f"{where}: invalid `{name}`: {error}", "Use `match` for a fixed text."
            ) from None
    return KnownError(**fields)


def _check_fields(table: dict[str, Any], where: str) -> None:
    for name, value in table.items():
        if name not in _FIELDS:
            raise DataError(f"{where}: unknown field `{name}`", f"Fields: {', '.join(_FIELDS)}.")
        if not isinstance(value, _FIELDS[name]) or (
            isinstance(value, list) and not all(isinstance(item, str) for item in value)
        ):
            wanted = "a list of texts" if _FIELDS[name] is list else _FIELDS[name].__name__
            raise DataError(f"{where}: `{name}` must be {wanted}", _EXAMPLE)
    for name in ("id", "cause", "fix"):
        if not table.get(name):
            raise DataError(f"{where}: `{name}` is missing", _EXAMPLE)
    if not any(table.get(name) for name in ("match", "regex", "exception", "last_resort")):
        raise DataError(f"{where}: neither `match` nor `regex` is given", _EXAMPLE)
    if table.get("role", "cause") not in ROLES:
        raise DataError(f"{where}: unknown role {table['role']!r}", f"Roles: {', '.join(ROLES)}.")
