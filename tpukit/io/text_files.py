"""Text files as they come: packed or not, in the encoding that their content shows."""

import bz2
import codecs
import contextlib
import functools
import gzip
import io
import itertools
import lzma
import re
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, TextIO

from tpukit.errors import DataError
from tpukit.io.files import require_regular
from tpukit.io.process import is_first_rank

CHUNK_BYTES = 2**20
MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"),
)  # fmt: skip
"""Byte order marks, the longest first."""
DAMAGED = (EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, RuntimeError)
"""What unpacking raises beside OSError; RuntimeError where a password or a method is missing."""


@contextlib.contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """The text of a file, unpacked, with its line ends. Raises DataError for what is none."""
    try:
        with _unpacked(path) as file, io.TextIOWrapper(file, _encoding(path), newline="") as text:
            yield text
    except OSError as error:
        raise DataError(
            f"Cannot read {path}: {error.strerror or error}.", "Expected a CSV or JSON file."
        ) from error
    except DAMAGED as error:
        raise DataError(f"{path}: damaged, or packed otherwise ({error}).", "Unpack it.") from error


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
