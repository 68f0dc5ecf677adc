"""CSV and JSON files, in a stream; every fault is named by file, row, column."""

import csv
import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tpukit.errors import DataError
from tpukit.io.files import require_regular

LARGEST_FIELD_BYTES = 64 * 2**20
SUFFIXES = (".csv", ".jsonl", ".json")
OTHER_FILES = {
    ".parquet": "pandas.read_parquet(FILE).to_json('train.jsonl', orient='records', lines=True)"
    " makes JSON lines of it.",
    **dict.fromkeys((".gz", ".bz2", ".xz", ".zip", ".zst"), "Unpack it."),
}
"""Suffixes of files that are not read, and what to do with them."""
UNREAD = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
"""Fields of messages that chat templates write beside the content."""
_AS_OBJECTS = "Write one object a line, or in a .json file an array of them."


@dataclass(frozen=True)
class Columns:
    """What the columns of a file are called."""

    prompt: str = "dialogue"
    completion: str = "summary"
    id: str | None = "id"
    """None: rows are known by their numbers."""
    further: tuple[str, ...] = ()
    """Columns that a template names."""
    has_messages: bool = False
    """The prompt's column holds messages (JSON), of which the last of the assistant is learned."""

    @property
    def names(self) -> tuple[str, ...]:
        """All of them, the id first."""
        return (*filter(None, [self.id]), self.prompt, self.completion, *self.further)


DIALOGUES = Columns()
"""Columns of dialogue summaries."""


@dataclass(frozen=True)
class Row:
    """One row; `number` counts data rows from 1, as a spreadsheet without its header would."""

    number: int
    id: str
    dialogue: str
    """The prompt's column."""
    summary: str
    """The completion's column; empty where the file has none."""
    further: Mapping[str, str] = field(default_factory=dict)
    """Other columns of a template."""


def read_rows(
    path: Path, *, summaries: bool, dialogues: bool = True, columns: Columns = DIALOGUES
) -> Iterator[Row]:
    """The rows of a file with the id's column and, as asked for, those of prompts and completions.

    Takes a byte order mark, quoted newlines, CR LF and fields of tens of megabytes. Raises
    `DataError` at the first thing it cannot take: a missing column, invalid UTF-8, a
    quote left open, an empty or repeated id, an empty field, or no rows at all.
    """
    has_messages, learned = dialogues and columns.has_messages, summaries
    summaries = summaries and not has_messages
    asked = ((columns.prompt, dialogues), (columns.completion, summaries))
    texts = tuple(name for name, wanted in asked if wanted)
    seen: dict[str, int] = {}
    records = _records(path)
    needed = (*filter(None, [columns.id]), *texts, *(columns.further if dialogues else ()))
    header = next(records, (0, []))[1]
    _check_header(path, header, needed)
    places = {name: header.index(name) for name in columns.names if name in header}
    number = 0
    for number, (line, fields) in enumerate(records, 1):
        where = f"{path}, row {number} (line {line})"
        if len(fields) != len(header):
            raise DataError(
                f"{where} has {len(fields)} fields, the header {len(header)}.",
                "Put fields that hold commas or newlines in quotes.",
            )
        values = {name: fields[at] for name, at in places.items()}
        for column, text in values.items():
            _check_text(where, column, text)
        row = _row(number, values, columns)
        _check_id(where, row, seen, columns.id)
        _check_texts(where, row, {name: values[name] for name in texts})
        yield _of_messages(where, row, columns.prompt, learned=learned) if has_messages else row
    if number == 0:
        raise DataError(
            f"{path} has no rows below its header.", "Give a file with at least one dialogue."
        )


def data_file(folder: Path, name: str) -> Path:
    """The file of a part in a data folder: CSV, else JSON where there is any."""
    paths = [folder / f"{name}{suffix}" for suffix in SUFFIXES]
    return next((path for path in paths if path.is_file()), paths[0])


def extra_columns(path: Path, columns: Columns = DIALOGUES) -> list[str]:
    """Columns that nothing reads, each with the known name it resembles, for a warning."""
    header = next(_records(path), (0, []))[1]
    return [
        name + _did_you_mean(name, columns.names) for name in header if name not in columns.names
    ]


def _records(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Each record with the line it starts on, the header first; blank lines are passed over."""
    if hint := OTHER_FILES.get(path.suffix):
        raise DataError(f"{path}: {path.suffix} is not read.", hint)
    try:
        yield from (_json_records if path.suffix in SUFFIXES[1:] else _csv_records)(path)
    except OSError as error:
        raise DataError(
            f"Cannot read {path}: {error.strerror}.",
            "`tpukit data dialogues --out DIR` makes files to try with.",
        ) from error


def _csv_records(path: Path) -> Iterator[tuple[int, list[str]]]:
    csv.field_size_limit(LARGEST_FIELD_BYTES)
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
            where, text = f"{path}, row {number} (line {start})", str(error)
            if "unexpected end of data" in text or "field larger" in text:
                raise DataError(
                    f"{where}: a quote is opened and never closed.",
                    'Close it; a quote within a quoted field is written twice ("").',
                ) from error
            raise DataError(
                f"{where}: not valid CSV ({text}).",
                "Fields with commas, quotes or newlines are put in quotes; a quote within is"
                ' doubled ("").',
            ) from error


def _json_records(path: Path) -> Iterator[tuple[int, list[str]]]:
    """JSON objects as records: the header is the names of the first."""
    header: list[str] = []
    for where, number, values in _json_objects(path):
        if not header:
            header = list(values)
            yield 1, header
        if values.keys() != set(header):
            raise DataError(
                f"{where} has {', '.join(values) or 'nothing'}; the first has {', '.join(header)}.",
                "Every object needs the same names.",
            )
        yield number, [_as_text(values[name]) for name in header]


def _json_objects(path: Path) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """The objects of a file, one a line or all in an array: where, the line or item, the object."""
    with require_regular(path).open("rb") as file:
        if path.suffix == ".json" and file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"[":
            file.seek(0)
            for number, values in enumerate(_parsed(f"{path}", file.read()), 1):
                yield f"{path}, item {number}", number, _object(f"{path}, item {number}", values)
            return
        file.seek(0)
        for number, line in enumerate(file, 1):
            where = f"{path}, line {number}"
            if line.strip():
                yield where, number, _object(where, _parsed(where, line))


def _as_text(value: Any) -> str:
    """A value as a field of CSV has it: null and NaN are empty."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return "" if text in ("null", "NaN") and text != value else text


def _parsed(where: str, text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON ({error}).", _AS_OBJECTS) from error


def _object(where: str, values: Any) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise DataError(f"{where}: a {type(values).__name__}.", _AS_OBJECTS)
    return values


def _check_header(path: Path, header: list[str], needed: Sequence[str]) -> None:
    if not header:
        raise DataError(f"{path} is empty.", f"Expected a header with {', '.join(needed)}.")
    for name in header:
        if name in needed and header.count(name) > 1:
            raise DataError(f"{path}: column {name!r} occurs twice.", "Keep one of them.")
    missing = [name for name in needed if name not in header]
    if missing:
        shown = ", ".join(repr(name) for name in header[:8])
        names = ", ".join(repr(name) for name in missing)
        raise DataError(
            f"{path} has no column {names}; it has {shown}.", _column_hint(header, missing, needed)
        )


def _column_hint(header: list[str], missing: list[str], needed: Sequence[str]) -> str:
    if len(header) == 1 and any(mark in header[0] for mark in ";\t|"):
        return "The file does not seem to be separated by commas."
    if "messages" in header:
        return "Conversations need --set chat=true --set prompt_column=messages."
    for name in missing:
        near = difflib.get_close_matches(name, [h.strip().lower() for h in header], 1, 0.5)
        if near:
            return f"Rename {near[0]!r} to {name!r}?"
    return f"Expected the columns {', '.join(needed)}."


def _did_you_mean(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name.strip().lower(), known, 1, 0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _row(number: int, values: Mapping[str, str], columns: Columns) -> Row:
    return Row(
        number,
        str(number) if columns.id is None else values.get(columns.id, "").strip(),
        values.get(columns.prompt, ""),
        values.get(columns.completion, ""),
        {name: values.get(name, "") for name in columns.further},
    )


def _of_messages(where: str, row: Row, column: str, *, learned: bool) -> Row:
    """The messages before the assistant's last one, which is the completion; what follows it in a
    conversation that is learned is left out."""
    where = f"{where}, column {column!r}"
    try:
        messages = json.loads(row.dialogue)
        if any(message.get(name) for message in messages for name in UNREAD):
            raise ValueError
        if learned and not any(message["role"] == "assistant" for message in messages):
            raise DataError(f"{where}: the assistant says nothing.", "Remove the row.")
        while learned and messages[-1]["role"] != "assistant":
            messages.pop()
        last = messages.pop()["content"] if messages[-1]["role"] == "assistant" else ""
        texts = [last, *(m[name] for m in messages for name in ("role", "content"))]
        if not messages or not all(isinstance(text, str) for text in texts):
            raise ValueError
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(
            f"{where}: not a list of messages of a role and a text.",
            'Expected [{"role": "user", "content": "..."}, ...]; what calls tools, and reasoning,'
            " is written into the content.",
        ) from error
    return replace(row, dialogue=json.dumps(messages, ensure_ascii=False), summary=last)


def _check_text(where: str, column: str, text: str) -> None:
    """Undecodable bytes and halves of characters are lone surrogates, which cannot be encoded."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        found = f"byte 0x{code & 0xFF:02x}" if 0xDC80 <= code <= 0xDCFF else f"\\u{code:04x} alone"
        raise DataError(
            f"{where}, column {column!r}: {found} is not UTF-8.", "Save the file as UTF-8."
        ) from error


def _check_texts(where: str, row: Row, texts: Mapping[str, str]) -> None:
    for column, text in texts.items():
        if not text.strip():
            raise DataError(
                f"{where}, column {column!r} is empty (id {row.id!r}).",
                "Remove the row or fill it in.",
            )


def _check_id(where: str, row: Row, seen: dict[str, int], column: str | None) -> None:
    if column is None:
        return
    if not row.id:
        raise DataError(
            f"{where}, column {column!r} is empty.", "Every row needs an id of its own."
        )
    if row.id in seen:
        raise DataError(
            f"{where}, column {column!r}: {row.id!r} was row {seen[row.id]}'s already.",
            "Ids must be unique.",
        )
    seen[row.id] = row.number
