"""CSV files as people have them, in a stream; every fault is named by file, row, column."""

from __future__ import annotations

import csv
import difflib
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from tpukit.errors import DataError
from tpukit.io.files import replacing, require_regular

KNOWN_COLUMNS = ("id", "dialogue", "summary")
LARGEST_FIELD_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Row:
    """One row; `number` counts data rows from 1, as a spreadsheet without its header would."""

    number: int
    id: str
    dialogue: str
    summary: str
    """Empty where the file has no summaries."""


def read_rows(
    path: Path, *, summaries: bool, dialogues: bool = True, blank: bool = False
) -> Iterator[Row]:
    """The rows of a CSV file with the columns `id` and, as asked for, `dialogue` and `summary`.

    Takes a byte order mark, quoted newlines, CR LF and fields of tens of megabytes. Raises
    `DataError` at the first thing it cannot take: a missing column, invalid UTF-8, a
    quote left open, an empty or repeated id, an empty field (unless `blank`), or no rows at all.
    """
    texts = tuple(
        name for name, asked in (("dialogue", dialogues), ("summary", summaries)) if asked
    )
    seen: dict[int, int] = {}
    records = _records(path)
    place = _column_places(path, next(records, (0, []))[1], ("id", *texts))
    number = 0
    for number, (line, fields) in enumerate(records, 1):
        where = f"{path}, row {number} (line {line})"
        if len(fields) != place.count:
            _raise_field_count(where, fields, place.count)
        row = _row(where, number, fields, place)
        _check_id(where, row, seen)
        if not blank:
            _check_texts(where, row, texts)
        yield row
    if number == 0:
        raise DataError(
            f"{path} has no rows below its header.", "Give a file with at least one dialogue."
        )


def write_table(path: Path, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Writes a CSV file atomically, quoted where needed."""
    with replacing(path) as partial, partial.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(rows)


def extra_columns(path: Path) -> list[str]:
    """Columns that nothing reads, each with the known name it resembles, for a warning."""
    header = next(_records(path), (0, []))[1]
    return [
        name + _did_you_mean(name, KNOWN_COLUMNS) for name in header if name not in KNOWN_COLUMNS
    ]


@dataclass(frozen=True)
class _Places:
    count: int
    of: dict[str, int]


def _records(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Each record with the line it starts on; blank lines are passed over."""
    csv.field_size_limit(LARGEST_FIELD_BYTES)
    try:
        with require_regular(path).open(
            "r", encoding="utf-8-sig", errors="surrogateescape", newline=""
        ) as file:
            reader = csv.reader(file, strict=True)
            start, number = 1, 0
            try:
                for fields in reader:
                    if fields:
                        yield start, fields
                        number += 1
                    start = reader.line_num + 1
            except csv.Error as error:
                _raise_syntax(f"{path}, row {number} (line {start})", error)
    except OSError as error:
        raise DataError(
            f"Cannot read {path}: {error.strerror}.",
            "`tpukit data dialogues --out DIR` makes files to try with.",
        ) from error


def _raise_syntax(where: str, error: csv.Error) -> NoReturn:
    text = str(error)
    if "unexpected end of data" in text or "field larger" in text:
        raise DataError(
            f"{where}: a quote is opened and never closed.",
            'Close it; a quote within a quoted field is written twice ("").',
        ) from error
    raise DataError(
        f"{where}: not valid CSV ({text}).",
        'Fields with commas, quotes or newlines are put in quotes; a quote within is doubled ("").',
    ) from error


def _column_places(path: Path, header: list[str], needed: Sequence[str]) -> _Places:
    if not header:
        raise DataError(f"{path} is empty.", f"Expected a header with {', '.join(needed)}.")
    for name in header:
        if name in needed and header.count(name) > 1:
            raise DataError(f"{path}: column {name!r} occurs twice.", "Keep one of them.")
    missing = [name for name in needed if name not in header]
    if missing:
        _raise_missing(path, header, missing, needed)
    places = {name: header.index(name) for name in KNOWN_COLUMNS if name in header}
    return _Places(len(header), places)


def _raise_missing(
    path: Path, header: list[str], missing: list[str], needed: Sequence[str]
) -> NoReturn:
    shown = ", ".join(repr(name) for name in header[:8])
    names = ", ".join(repr(name) for name in missing)
    raise DataError(
        f"{path} has no column {names}; it has {shown}.", _column_hint(header, missing, needed)
    )


def _column_hint(header: list[str], missing: list[str], needed: Sequence[str]) -> str:
    if len(header) == 1 and any(mark in header[0] for mark in ";\t|"):
        return "The file does not seem to be separated by commas."
    for name in missing:
        near = difflib.get_close_matches(name, [h.strip().lower() for h in header], 1, 0.5)
        if near:
            return f"Rename {near[0]!r} to {name!r}?"
    return f"Expected the columns {', '.join(needed)}."


def _did_you_mean(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name.strip().lower(), known, 1, 0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _raise_field_count(where: str, fields: list[str], expected: int) -> NoReturn:
    raise DataError(
        f"{where} has {len(fields)} fields, the header {expected}.",
        "Put fields that hold commas or newlines in quotes.",
    )


def _row(where: str, number: int, fields: list[str], place: _Places) -> Row:
    texts = {name: fields[place.of[name]] if name in place.of else "" for name in KNOWN_COLUMNS}
    for column, text in texts.items():
        _check_text(where, column, text)
    return Row(number, texts["id"].strip(), texts["dialogue"], texts["summary"])


def _check_text(where: str, column: str, text: str) -> None:
    """Undecodable bytes arrive as lone surrogates, which cannot be encoded again."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        byte = ord(text[error.start]) - 0xDC00
        raise DataError(
            f"{where}, column {column!r}: byte 0x{byte & 0xFF:02x} is not UTF-8.",
            "Save the file as UTF-8.",
        ) from error


def _check_texts(where: str, row: Row, columns: Sequence[str]) -> None:
    for column in columns:
        if not getattr(row, column).strip():
            raise DataError(
                f"{where}, column {column!r} is empty (id {row.id!r}).",
                "Remove the row or fill it in.",
            )


def _check_id(where: str, row: Row, seen: dict[int, int]) -> None:
    if not row.id:
        raise DataError(f"{where}, column 'id' is empty.", "Every row needs an id of its own.")
    # Eight bytes an id: a million ids stay under 200 MB.
    digest = int.from_bytes(hashlib.blake2b(row.id.encode(), digest_size=8).digest(), "little")
    if digest in seen:
        raise DataError(
            f"{where}, column 'id': {row.id!r} was row {seen[digest]}'s already.",
            "Ids must be unique.",
        )
    seen[digest] = row.number
