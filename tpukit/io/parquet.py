"""Parquet files as tables, by pyarrow."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tpukit.errors import DataError
from tpukit.io.json_records import json_text

INDEX = "__index_level_"
"""What pandas calls an index that it writes beside the columns."""


def pyarrow_of(path: Path | str) -> Any:
    """The module `pyarrow.parquet`. Raises DataError, which names the file, where it is missing."""
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(
            f"{path}: Parquet is read by pyarrow, which is not installed.",
            "`pip install pyarrow`, or write the table as CSV or JSON lines.",
        ) from error
    return parquet


def parquet_records(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The names of the columns, then the texts of each row, as in JSON; a row has no line."""
    parquet = pyarrow_of(path)
    try:
        with parquet.ParquetFile(path) as file:
            names = [n for n in file.schema_arrow.names if not n.startswith(INDEX)]
            yield 1, names
            number = 0
            for batch in file.iter_batches(columns=names):
                for row in batch.to_pylist():
                    number += 1
                    where = f"{path}, row {number}"
                    yield 0, [json_text(where, name, row[name]) for name in names]
    except OSError as error:
        raise DataError(
            f"Cannot read {path}: {error.strerror or error}.", "Name a file."
        ) from error
    except ValueError as error:  # pyarrow's own are
        raise DataError(f"{path}: not Parquet ({error}).", "Write the table again.") from error


def merge_parquet(parts: Iterable[Path], into: Path) -> None:
    """One file of the rows of several with the same columns."""
    parquet, writer = pyarrow_of(into), None
    for part in parts:
        with parquet.ParquetFile(part) as file:
            writer = writer or parquet.ParquetWriter(into, file.schema_arrow)
            for batch in file.iter_batches():
                writer.write_batch(batch)
    if writer is not None:
        writer.close()
