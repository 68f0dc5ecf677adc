"""Tables of every task: CSV, JSON and Parquet files as pandas writes them, and submissions.

Separators, encodings and archives are detected from the content. Names of columns are compared in
Unicode's normal form C and without blanks around. Each mistake names file, row and column.
"""

import contextlib
import csv
import difflib
import io
import itertools
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TextIO

from tpukit.errors import DataError
from tpukit.io.files import replacing
from tpukit.io.json_records import json_records
from tpukit.io.parquet import parquet_records
from tpukit.io.text_files import open_text

FORMS = (".csv", ".jsonl", ".json", ".tsv", ".ndjson")
PACKED = ("", ".gz", ".zip", ".bz2", ".xz")
SUFFIXES = (*(form + packed for packed in PACKED for form in FORMS), ".parquet")
"""Ends of the names of tables, the likeliest first."""
OTHER_FILES = {
    ".zst": "Unpack it.",
    **dict.fromkeys((".xls", ".xlsx", ".ods"), "Save the sheet as CSV."),
}
"""Suffixes of files that are not read, and what to do with them."""
SEPARATORS = ",;\t|"
LARGEST_FIELD = 64 * 2**20
"""Characters of the largest field."""
SNIFFED_CHARACTERS, SNIFFED_RECORDS = 2**20, 50
"""What the separator is detected from."""


class Record(NamedTuple):
    """A row: its number from 1, the line it begins at (0 in a JSON array), its fields."""

    number: int
    line: int
    fields: list[str]


@dataclass(frozen=True)
class TableStream:
    """A table that is read once, row by row."""

    path: Path
    columns: list[str]
    records: Iterator[Record] = field(repr=False)

    def where(self, record: Record) -> str:
        """File and place of a row, for messages."""
        return _where(self.path, record.number, record.line)

    def places(self, names: Sequence[str], hint: str | None = None) -> dict[str, int]:
        """Name -> position of its column. Raises DataError for columns that are not there; hint:
        what to do where none has a similar name."""
        found = {name: column_place(self.columns, name) for name in names}
        places = {name: place for name, place in found.items() if place is not None}
        if missing := [name for name in names if name not in places]:
            wanted = ", ".join(map(repr, missing))
            there = ", ".join(map(repr, self.columns[:8])) + ", ..." * (len(self.columns) > 8)
            raise DataError(
                f"{self.path} has no column {wanted}; it has {there}.",
                _renamed(self.columns, names, missing)
                or hint
                or f"Expected the columns {', '.join(names)}.",
            )
        return places


@dataclass(frozen=True)
class Table:
    """A table in memory: a text in each row for each column."""

    path: Path
    columns: list[str]
    rows: list[list[str]]
    lines: list[int]
    """The line that each row begins at."""

    def where(self, row: int) -> str:
        """File and place of a row, counted from 0, for messages."""
        return _where(self.path, row + 1, self.lines[row])

    def column(self, name: str) -> list[str]:
        """The values of a column. Raises DataError where there is none."""
        place = TableStream(self.path, self.columns, iter(())).places([name])[name]
        return [row[place] for row in self.rows]

    def records(self) -> list[dict[str, str]]:
        """Each row by the names of the columns, without blanks around these."""
        names = [plain_name(name) for name in self.columns]
        return [dict(zip(names, row, strict=True)) for row in self.rows]


def read_table(path: Path | str) -> Table:
    """Reads a CSV or JSON file. Raises DataError for a file that is not a table."""
    stream = open_table(Path(path))
    records = list(stream.records)
    return Table(
        stream.path, stream.columns, [r.fields for r in records], [r.line for r in records]
    )


def open_table(path: Path) -> TableStream:
    """The columns of a table and, as they are read, its rows. Raises DataError, as these do."""
    records = _records(path)
    columns = next(records, (0, []))[1]
    if not columns:
        raise DataError(f"{path} is empty.", "Expected a header and rows.")
    named = [name for name in map(plain_name, columns) if name]
    for name in {name: None for name in named if named.count(name) > 1}:
        alike = ", ".join(ascii(each) for each in columns if plain_name(each) == name)
        raise DataError(
            f"{path}: column {name!r} occurs {named.count(name)} times ({alike}).",
            "Rename or remove all but one: which of them is meant is not known.",
        )
    return TableStream(path, columns, _checked(path, columns, records))


def table_file(folder: Path, name: str) -> Path:
    """The table of a name in a folder, of any form; the CSV file where there is none."""
    paths = [folder / f"{name}{suffix}" for suffix in SUFFIXES]
    return next((path for path in paths if path.is_file()), paths[0])


def is_table_name(path: Path) -> bool:
    """Whether a file of this name is read as a table, and no folder."""
    return path.name.lower().endswith(SUFFIXES)


def plain_name(name: str) -> str:
    """A name as names are compared: in normal form C, without blanks and marks around it."""
    if name.isascii():
        return name.strip()
    return unicodedata.normalize("NFC", name).strip("\ufeff\u200b \t\r\n\xa0")


def column_place(columns: Sequence[str], name: str) -> int | None:
    """The position of a column; None where there is none."""
    plain = plain_name(name)
    return next((i for i, other in enumerate(columns) if plain_name(other) == plain), None)


def spelled(name: str) -> str:
    """A name in quotes and, where it may look like another, with its characters' codes."""
    return repr(name) if name.isascii() else f"{name!r} ({name!a})"


def write_csv(path: Path, rows: Iterable[Iterable[object]]) -> None:
    """Writes rows to a CSV file atomically; names of files keep the bytes that they have."""
    with replacing(path) as partial, partial.open("w", -1, "utf-8", "surrogateescape", "") as file:
        csv.writer(_LineFeeds(file)).writerows(rows)


class _LineFeeds:
    """Ends rows with LF. Those that csv ends with CR LF have both in quotes in every release."""

    def __init__(self, file: TextIO) -> None:
        self.file = file

    def write(self, row: str) -> None:
        self.file.write(f"{row.removesuffix(chr(13) + chr(10))}\n")


def _where(path: Path, number: int, line: int) -> str:
    return f"{path}, row {number}" + (f" (line {line})" if line else "")


def _renamed(columns: Sequence[str], needed: Sequence[str], missing: Sequence[str]) -> str | None:
    """Which column to rename; None where none has a similar name."""
    known = {plain_name(name) for name in needed}
    others = {plain_name(name).lower(): name for name in columns if plain_name(name) not in known}
    for name in missing:
        for near in difflib.get_close_matches(name.lower(), others, 1, 0.6):
            return f"Rename {spelled(others[near])} to {name!r}?"
    return None


def _checked(
    path: Path, columns: Sequence[str], records: Iterable[tuple[int, list[str]]]
) -> Iterator[Record]:
    number = 0
    for line, fields in records:
        if len(columns) > 1 and len(fields) == 1 and not fields[0].strip():
            continue
        number += 1
        if len(fields) != len(columns):
            where = _where(path, number, line)
            raise DataError(
                f"{where} has {len(fields)} fields, the header {len(columns)}.",
                "Put fields that hold separators or line ends (a \\r alone is one) in quotes.",
            )
        yield Record(number, line, fields)


def _records(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The header, then each row, with the line it starts on; blank lines are left out."""
    if hint := OTHER_FILES.get(path.suffix):
        raise DataError(f"{path}: {path.suffix} is not read.", hint)
    if path.suffix.lower() == ".parquet":
        yield from parquet_records(path)
        return
    is_json = re.search(r"\.(json|jsonl|ndjson)\b", path.name.lower())
    with open_text(path) as text:
        yield from (json_records if is_json else _csv_records)(path, text)


# -- CSV -----------------------------------------------------------------------------------------
def _csv_records(path: Path, text: TextIO) -> Iterator[tuple[int, list[str]]]:
    csv.field_size_limit(LARGEST_FIELD)
    beginning = text.read(SNIFFED_CHARACTERS)
    text.seek(0)
    # The line by which spreadsheets name the separator.
    declared = re.match(r"sep=(.)\r?\n", beginning)
    skipped = len([text.readline()] if declared else [])
    separator = declared[1] if declared else _separator(beginning)
    reader = csv.reader(text, strict=True, delimiter=separator)
    start, number = 1 + skipped, 0
    try:
        for fields in reader:
            if fields:
                yield start, fields
                number += 1
            start = reader.line_num + 1 + skipped
    except csv.Error as error:
        where, cause = _where(path, number, start), str(error)
        if "unexpected end of data" in cause or "field larger" in cause:
            raise DataError(
                f"{where}: a quote is opened and never closed.",
                'Close it; a quote within a quoted field is written twice ("").',
            ) from error
        raise DataError(
            f"{where}: not valid CSV ({cause}).",
            "Fields with commas, quotes or newlines are put in quotes; a quote within is"
            ' doubled ("").',
        ) from error


def _separator(start: str) -> str:
    """The separator that gives the header several fields, and most rows as many."""

    def agreement(separator: str) -> tuple[bool, float, int]:
        with contextlib.suppress(csv.Error):
            found = csv.reader(io.StringIO(start, newline=""), delimiter=separator)
            records = [record for record in itertools.islice(found, SNIFFED_RECORDS) if record]
            if len(start) == SNIFFED_CHARACTERS:
                records = records[:-1] or records
            count = len(records[0]) if records else 0
            rows = [len(record) == count for record in records[1:]] or [True]
            share = sum(rows) / len(rows)
            return count > 1 and share >= 0.5, share, count
        return False, 0.0, 0

    best = max(SEPARATORS, key=agreement)
    return best if agreement(best)[0] else ","
