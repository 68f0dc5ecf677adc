"""Tables of every task: CSV and JSON files as spreadsheets and pandas write them, and submissions.

Separators, encodings and archives are detected from the content. Names of columns are compared in
Unicode's normal form C and without blanks around. Each mistake names file, row and column.
"""

import bz2
import codecs
import contextlib
import csv
import difflib
import functools
import gzip
import io
import itertools
import json
import lzma
import math
import re
import sys
import unicodedata
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple, TextIO

from tpukit.errors import DataError
from tpukit.io.files import replacing, require_regular
from tpukit.io.process import is_first_rank

FORMS = (".csv", ".jsonl", ".json", ".tsv", ".ndjson")
SUFFIXES = tuple(form + packed for packed in ("", ".gz", ".zip", ".bz2", ".xz") for form in FORMS)
"""Ends of the names of tables, the likeliest first."""
OTHER_FILES = {
    ".parquet": "pandas.read_parquet(FILE).to_json('train.jsonl', orient='records', lines=True)"
    " makes JSON lines of it.",
    ".zst": "Unpack it.",
    **dict.fromkeys((".xls", ".xlsx", ".ods"), "Save the sheet as CSV."),
}
"""Suffixes of files that are not read, and what to do with them."""
SEPARATORS = ",;\t|"
LARGEST_FIELD = 64 * 2**20
"""Characters of the largest field."""
SNIFFED_CHARACTERS, SNIFFED_RECORDS = 2**20, 50
"""What the separator is detected from."""
CHUNK_BYTES = 2**20
MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"),
)  # fmt: skip
"""Byte order marks, the longest first."""
DAMAGED = (EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, RuntimeError)
"""What unpacking raises beside OSError; RuntimeError where a password or a method is missing."""
_AS_RECORDS = "Write one object a line, or an array of them: pandas' to_json(orient='records')."


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
        """Name -> position of its column. Raises DataError for columns that are not there."""
        places = {name: column_place(self.columns, name) for name in names}
        missing = [name for name, place in places.items() if place is None]
        if missing:
            wanted = ", ".join(map(repr, missing))
            there = ", ".join(map(repr, self.columns[:8])) + ", ..." * (len(self.columns) > 8)
            raise DataError(
                f"{self.path} has no column {wanted}; it has {there}.",
                hint or _similar(self.columns, names, missing),
            )
        return {name: place for name, place in places.items() if place is not None}


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


def _similar(columns: Sequence[str], needed: Sequence[str], missing: Sequence[str]) -> str:
    """What to do about missing columns."""
    known = {plain_name(name) for name in needed}
    others = {plain_name(name).lower(): name for name in columns if plain_name(name) not in known}
    for name in missing:
        for near in difflib.get_close_matches(name.lower(), others, 1, 0.6):
            return f"Rename {spelled(others[near])} to {name!r}?"
    return f"Expected the columns {', '.join(needed)}."


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
    try:
        with _unpacked(path) as file, io.TextIOWrapper(file, _encoding(path), newline="") as text:
            is_json = re.search(r"\.(json|jsonl|ndjson)\b", path.name.lower())
            yield from (_json_records if is_json else _csv_records)(path, text)
    except OSError as error:
        raise DataError(
            f"Cannot read {path}: {error.strerror or error}.", "Expected a CSV or JSON file."
        ) from error
    except DAMAGED as error:
        raise DataError(f"{path}: damaged, or packed otherwise ({error}).", "Unpack it.") from error


# -- bytes and characters ------------------------------------------------------------------------
def _unpacked(path: Path) -> IO[bytes]:
    """The content of a file, or of the one file that it packs."""
    with require_regular(path).open("rb") as file:
        head = file.read(6)
    openers: Mapping[bytes, Callable[[Path], Any]] = {
        b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open, b"PK\3\4": _only_member,
    }  # fmt: skip
    opened = next((opener for mark, opener in openers.items() if head.startswith(mark)), None)
    return path.open("rb") if opened is None else opened(path)


def _only_member(path: Path) -> IO[bytes]:
    archive = zipfile.ZipFile(path)
    names = [name for name in archive.namelist() if not name.endswith("/")]
    names = [name for name in names if not name.startswith(("__MACOSX/", "."))]
    if len(names) != 1:
        raise DataError(
            f"{path} packs {len(names)} files ({', '.join(map(repr, names[:3]))}); a table is one.",
            "Unpack it, and name one of them.",
        )
    return archive.open(names[0])


def _chunks(path: Path) -> Iterator[bytes]:
    with _unpacked(path) as file:
        yield from iter(lambda: file.read(CHUNK_BYTES), b"")


def _encoding(path: Path) -> str:
    """The encoding of the whole file. Raises DataError at the first byte that is invalid."""
    head = next(_chunks(path), b"")
    encoding = next((name for mark, name in MARKS if head.startswith(mark)), _unmarked(head))
    decoder, lines = codecs.getincrementaldecoder(encoding)(), 1
    for chunk in itertools.chain(_chunks(path), [b""]):
        try:
            text = decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            if encoding == "utf-8" and _is_western(path):
                _say(f"{path} is not UTF-8: it is read as cp1252, the encoding of Windows.")
                return "cp1252"
            if b"\0" in head:
                raise DataError(f"{path}: not a CSV or JSON file.", "Name a table.") from error
            raise DataError(
                f"{path}, line {lines + error.object.count(10, 0, error.start)}: byte"
                f" 0x{error.object[error.start]:02x} is not {encoding.upper()}.",
                "Save the file as UTF-8.",
            ) from error
        if "\0" in text:
            line = lines + text.count("\n", 0, text.index("\0"))
            raise DataError(f"{path}: not a CSV or JSON file: NUL in line {line}.", "Name a table.")
        lines += text.count("\n")
    return encoding


def _unmarked(head: bytes) -> str:
    """UTF-8, or UTF-16 where every other byte of a file without a mark is 0."""
    pairs = len(head) // 2
    zeros = head[: 2 * pairs : 2].count(0), head[1 : 2 * pairs : 2].count(0)
    if max(zeros) * 2 <= pairs or min(zeros) * 10 > pairs:
        return "utf-8"
    return "utf-16-be" if zeros[0] > zeros[1] else "utf-16-le"


def _is_western(path: Path) -> bool:
    """Whether what is not UTF-8 is cp1252: some letters with accents, and nothing of UTF-8.

    Damaged UTF-8 has whole characters as well; other encodings have long runs of such bytes.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    return not any(
        re.search(rb"[\x80-\xff]{5}|[\x00-\x08\x0e-\x1f\x81\x8d\x8f\x90\x9d]", chunk)
        or re.search("[^\\x00-\\x7f\udc80-\udcff]", decoder.decode(chunk))
        for chunk in _chunks(path)
    )


@functools.cache
def _say(remark: str) -> None:
    """Prints a remark once."""
    if is_first_rank():
        print(remark, file=sys.stderr, flush=True)


# -- CSV -----------------------------------------------------------------------------------------
def _csv_records(path: Path, text: TextIO) -> Iterator[tuple[int, list[str]]]:
    csv.field_size_limit(LARGEST_FIELD)
    separator = _separator(text.read(SNIFFED_CHARACTERS))
    text.seek(0)
    reader = csv.reader(text, strict=True, delimiter=separator)
    start, number = 1, 0
    try:
        for fields in reader:
            if fields:
                yield start, fields
                number += 1
            start = reader.line_num + 1
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


# -- JSON ----------------------------------------------------------------------------------------
def _json_records(path: Path, text: TextIO) -> Iterator[tuple[int, list[str]]]:
    """JSON objects as records: the header is the names of the first."""
    header: list[str] = []
    for where, line, values in _json_objects(path, text):
        if not header:
            header = list(values)
            yield 1, header
        if values.keys() != set(header):
            raise DataError(
                f"{where} has {', '.join(values) or 'nothing'}; the first has {', '.join(header)}.",
                "Every object needs the same names.",
            )
        yield line, [_as_text(where, name, values[name]) for name in header]


def _json_objects(path: Path, text: TextIO) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """The objects of a file, one a line or all in one value: where, the line or 0, the object."""
    lines = ((number, line) for number, line in enumerate(text, 1) if line.strip())
    first, second = next(lines, None), next(lines, None)
    if first is None:
        return
    whole = second is None
    if second is not None and ".json" in path.suffixes:
        try:
            whole = not isinstance(json.loads(first[1]), dict | list)
        except ValueError:
            whole = True
    if whole:
        rest = "" if second is None else second[1] + "".join(line for _, line in lines)
        value = _parsed(f"{path}", first[1] + rest)
        for item, row in enumerate(_rows_of(path, value), 1):
            begun = first[0] if row is value else 0
            where = f"{path}, line {begun}" if begun else f"{path}, item {item}"
            yield where, begun, _object(where, row)
        return
    for number, written in itertools.chain(filter(None, [first, second]), lines):
        where = f"{path}, line {number}"
        yield where, number, _object(where, _parsed(where, written))


def _rows_of(path: Path, value: Any) -> Sequence[Any]:
    """The objects of an array, or of one of the forms in which pandas writes a table."""
    if isinstance(value, list) and value and all(isinstance(row, list) for row in value):
        raise DataError(f"{path}: rows without names of columns (orient='values').", _AS_RECORDS)
    if isinstance(value, list):
        return value
    if not isinstance(value, dict) or not value:
        return [value]
    parts = list(value.values())
    if all(isinstance(part, dict) for part in parts):
        return _rows_of_objects(path, value)
    if value.keys() == {"schema", "data"}:
        return [{n: row[n] for n in row if n != "index"} for row in value["data"]]
    columns, rows = list(value), None
    if {"columns", "data"} <= value.keys() <= {"columns", "index", "data"}:
        columns, rows = value["columns"], value["data"]
    elif len(parts) > 1 and all(isinstance(part, list) and _is_flat(part) for part in parts):
        rows = itertools.zip_longest(*parts, fillvalue=())
    try:
        named = [dict(zip(map(str, columns), row, strict=True)) for row in rows or ()]
    except (TypeError, ValueError):
        named = [{"": ()}]
    if any(() in row.values() for row in named):
        raise DataError(f"{path}: rows of other lengths than the columns.", _AS_RECORDS)
    return [value] if rows is None else named


def _is_flat(values: list[Any]) -> bool:
    return not any(isinstance(value, dict | list) for value in values)


def _rows_of_objects(path: Path, value: dict[str, dict[str, Any]]) -> Sequence[Any]:
    """Columns by name of rows by number, or rows by number of columns by name."""
    inner = list(next(iter(value.values())))
    by_number = all(map(str.isdecimal, value)), all(map(str.isdecimal, inner))
    if by_number == (True, False):
        return list(value.values())
    if by_number == (False, True) and all(column.keys() == {*inner} for column in value.values()):
        return [{name: column[row] for name, column in value.items()} for row in inner]
    raise DataError(
        f"{path}: objects in an object, and which are rows and which columns is not clear"
        f" ({', '.join(list(value)[:3])} of {', '.join(inner[:3])}).",
        _AS_RECORDS,
    )


def _as_text(where: str, column: str, value: Any) -> str:
    """A value as a field of CSV has it: null and NaN are empty."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}, column {column!r}: \\u{ord(text[error.start]):04x} alone is not UTF-8.",
            "It is half of a character: write the whole one.",
        ) from error
    return text


def _parsed(where: str, text: str) -> Any:
    try:
        return json.loads(text.removeprefix("\ufeff"), object_pairs_hook=_once_each)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON ({error}).", _AS_RECORDS) from error


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"a name of {', '.join(list(found)[:3])} is there twice")
    return found


def _object(where: str, values: Any) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise DataError(f"{where}: a {type(values).__name__}.", _AS_RECORDS)
    return values
