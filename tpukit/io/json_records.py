"""JSON files as tables: objects by line, in an array, or in the orientations of pandas."""

import itertools
import json
import math
from collections.abc import Iterator, Sequence
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
