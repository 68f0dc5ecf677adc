"""JSON files as tables: an object a line, or an array of objects."""

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from tpukit.errors import DataError

_AS_RECORDS = "Write one object a line, or an array of them: pandas' to_json(orient='records')."


def json_records(path: Path, text: TextIO) -> Iterator[tuple[int, list[str]]]:
    """The names of the first object, then the texts of each, with the line (0 in an array)."""
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
        yield line, [json_text(where, name, values[name]) for name in header]


def _json_objects(path: Path, text: TextIO) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """The objects of a file, one a line or all in one array: where, the line or 0, the object."""
    lines = ((number, line) for number, line in enumerate(text, 1) if line.strip())
    first = next(lines, None)
    if first is None:
        return
    if first[1].lstrip("\ufeff \t").startswith("["):
        whole = first[1] + "".join(line for _, line in lines)
        for item, row in enumerate(_parsed(f"{path}", whole), 1):
            where = f"{path}, item {item}"
            yield where, 0, _object(where, row)
        return
    second = next(lines, None)
    for number, written in itertools.chain(filter(None, [first, second]), lines):
        where = f"{path}, line {number}"
        row = _object(where, _parsed(where, written))
        if second is None and _is_of_columns(row):
            raise DataError(f"{path}: one object, of columns and not of a row.", _AS_RECORDS)
        yield where, number, row


def _is_of_columns(values: dict[str, Any]) -> bool:
    """Whether the only object of a file is a whole table, as pandas' `to_json()` writes it: columns
    by name of rows by number, rows by number, or parts of a table; a row may hold messages."""
    parts = list(values.values())
    if "data" in values and values.keys() & {"columns", "schema"}:
        return True
    if all(isinstance(part, dict) for part in parts):
        return all(map(str.isdecimal, values)) or all(
            map(str.isdecimal, (key for part in parts for key in part))
        )
    return len(parts) > 1 and all(isinstance(part, list) and _is_flat(part) for part in parts)


def _is_flat(values: list[Any]) -> bool:
    return bool(values) and not any(isinstance(value, dict | list) for value in values)


def json_text(where: str, column: str, value: Any) -> str:
    """A value as a field of CSV has it: null and NaN are empty."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bytes):  # Parquet's
        value = value.decode("utf-8", "backslashreplace")
    if not isinstance(value, bool | int | float | list | dict):  # texts, Parquet's dates, decimals
        text = str(value)
    else:
        text = json.dumps(value, ensure_ascii=False, default=str)
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
