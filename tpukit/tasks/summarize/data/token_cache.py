"""A training file as tokens: one memory-mapped file, keyed by content, tokenizer and context.

Layout: a JSON header padded to 4096 bytes, the tokens of all samples end to end, then for each
sample where it starts (one more for the end), how many targets it has, and its row in the file.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tpukit.errors import DataError
from tpukit.tasks.summarize.data.buckets import SampleSizes
from tpukit.tasks.summarize.data.csv_file import Row, read_rows
from tpukit.tasks.summarize.data.encoding_workers import EncodedRow, EncodingWorkers, encode_rows
from tpukit.tasks.summarize.data.prompt import PromptFormat
from tpukit.tasks.summarize.data.tokenizer import Tokenizer

FORMAT = 1
HEADER_BYTES = 4096
ROWS_A_CHUNK = 500
CHUNKS_WORTH_WORKERS = 4
Array = np.ndarray[Any, Any]
Progress = Callable[[int], None]
"""Called with the number of rows read so far."""


def no_progress(_rows: int) -> None:
    """Shows nothing."""


def cache_folder() -> Path:
    """`$TPUKIT_CACHE_DIR`, else the user's cache folder."""
    named = os.environ.get("TPUKIT_CACHE_DIR")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tpukit"


@dataclass(frozen=True)
class TokenCache:
    """The samples of one file; arrays are views of the mapped file."""

    path: Path
    tokens: Array
    starts: Array
    """int64 (samples + 1,)"""
    targets: Array
    """int32 (samples,): how many of a sample's last tokens are learned."""
    rows: Array
    """int64 (samples,): a sample's row in the CSV file, from 1."""
    skipped: int
    """Rows left out because their summary is too long."""

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def lengths(self) -> Array:
        """int64 (samples,): tokens of each sample, prompt and targets."""
        lengths: Array = np.diff(self.starts)
        return lengths

    def sizes(self, indices: Array) -> SampleSizes:
        """Of some of the samples."""
        return SampleSizes(self.lengths[indices], np.asarray(self.targets[indices]))

    def example(self, index: int) -> tuple[Array, int]:
        """The tokens of a sample and its number of targets."""
        start, stop = self.starts[index], self.starts[index + 1]
        return self.tokens[start:stop], int(self.targets[index])


def open_token_cache(
    csv_path: Path,
    tokenizer: Tokenizer,
    block_size: int,
    folder: Path | None = None,
    progress: Progress = no_progress,
) -> TokenCache:
    """The tokens of `csv_path`, built on first use; other processes wait for the one that builds.

    A build that is killed leaves nothing that is taken for a cache. Raises `DataError` for what
    the file holds, and where the cache cannot be written.
    """
    folder = (folder or cache_folder()) / "tokens"
    path = folder / f"{_key(csv_path, tokenizer, block_size)}.tokens"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(path.with_suffix(".lock")):
            cache = _open(path)
            if cache is None:
                _build(path, csv_path, PromptFormat(tokenizer, block_size), progress)
                cache = _open(path)
    except OSError as error:
        raise DataError(
            f"Cannot write the token cache {path}: {error.strerror or error}.",
            "Set TPUKIT_CACHE_DIR to a folder with room.",
        ) from error
    assert cache is not None
    if len(cache) == 0:
        raise DataError(
            f"{csv_path}: all {cache.skipped} summaries are too long for a context of {block_size}"
            " tokens.",
            "Raise --block-size.",
        )
    return cache


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds a lock between processes; it dies with its process."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def file_digest(path: Path) -> str:
    """The sha256 of a file. Raises `DataError` where it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(
            f"Cannot read {path}: {error.strerror}.",
            "`tpukit data dialogues --out DIR` makes files to try with.",
        ) from error


def _key(csv_path: Path, tokenizer: Tokenizer, block_size: int) -> str:
    parts = f"{FORMAT}/{file_digest(csv_path)}/{tokenizer.fingerprint}/{block_size}"
    return hashlib.sha256(parts.encode()).hexdigest()[:32]


def _open(path: Path) -> TokenCache | None:
    if not path.exists():
        return None
    with path.open("rb") as file:
        header = json.loads(file.read(HEADER_BYTES).rstrip(b"\0"))
    samples = header["samples"]
    data = np.memmap(path, np.uint8, "r")
    places = _places(header)
    return TokenCache(
        path,
        _view(data, places[0], header["tokens"], np.dtype(header["dtype"])),
        _view(data, places[1], samples + 1, np.dtype(np.int64)),
        _view(data, places[2], samples, np.dtype(np.int32)),
        _view(data, places[3], samples, np.dtype(np.int64)),
        header["skipped"],
    )


def _places(header: dict[str, Any]) -> list[int]:
    """Byte offsets of tokens, starts, targets and rows, each aligned to 8."""
    samples = header["samples"]
    sizes = [header["tokens"] * np.dtype(header["dtype"]).itemsize, (samples + 1) * 8, samples * 4]
    return list(itertools.accumulate(map(_aligned, sizes), initial=HEADER_BYTES))


def _aligned(size: int) -> int:
    return -(-size // 8) * 8


def _view(data: Array, start: int, count: int, dtype: np.dtype[Any]) -> Array:
    view: Array = data[start : start + count * dtype.itemsize].view(dtype)
    return view


# -- building ---------------------------------------------------------------------------------
def _build(path: Path, csv_path: Path, prompts: PromptFormat, progress: Progress) -> None:
    """Written to one name under the lock, synced, renamed; a leftover is simply overwritten."""
    beside = path.with_suffix(".part")
    dtype = np.uint16 if prompts.tokenizer.vocabulary_size <= 2**16 else np.uint32
    try:
        with beside.open("wb") as file:
            file.write(b"\0" * HEADER_BYTES)
            header = _write_samples(
                file, read_rows(csv_path, summaries=True), prompts, dtype, progress
            )
            file.seek(0)
            file.write(json.dumps(header).encode().ljust(HEADER_BYTES, b"\0"))
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _write_samples(
    file: BinaryIO, rows: Iterable[Row], prompts: PromptFormat, dtype: type, progress: Progress
) -> dict[str, Any]:
    starts, targets, row_numbers = [np.zeros(1, np.int64)], [], []
    done = tokens = 0
    for chunk in encoded_chunks(rows, prompts):
        kept = [(number, example) for number, example in chunk if example is not None]
        lengths = np.array([len(example.tokens) for _, example in kept], np.int64)
        starts.append(tokens + np.cumsum(lengths))
        targets.append(np.array([example.targets for _, example in kept], np.int32))
        row_numbers.append(np.array([number for number, _ in kept], np.int64))
        for _, example in kept:
            file.write(np.array(example.tokens, dtype).tobytes())
        tokens += int(lengths.sum())
        done += len(chunk)
        progress(done)
    file.write(b"\0" * (-file.tell() % 8))
    for arrays in (starts, targets, row_numbers):
        file.write(np.concatenate(arrays).tobytes())
        file.write(b"\0" * (-file.tell() % 8))
    samples = sum(map(len, targets))
    return {
        "samples": samples,
        "tokens": tokens,
        "dtype": np.dtype(dtype).name,
        "skipped": done - samples,
    }


def encoded_chunks(rows: Iterable[Row], prompts: PromptFormat) -> Iterator[list[EncodedRow]]:
    """The rows in order as examples, a chunk at a time, with all cores where it pays."""
    chunks = _chunks(rows)
    start = list(itertools.islice(chunks, CHUNKS_WORTH_WORKERS))
    cores = os.cpu_count() or 1
    if len(start) < CHUNKS_WORTH_WORKERS or cores == 1:
        yield from (encode_rows(prompts, chunk) for chunk in itertools.chain(start, chunks))
        return
    with EncodingWorkers(prompts, cores) as workers:
        yield from workers.encode(itertools.chain(start, chunks))


def _chunks(rows: Iterable[Row]) -> Iterator[list[Row]]:
    rows = iter(rows)
    while chunk := list(itertools.islice(rows, ROWS_A_CHUNK)):
        yield chunk
