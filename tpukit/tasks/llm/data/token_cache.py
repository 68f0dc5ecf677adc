"""A training file as tokens: one memory-mapped file, keyed by content, tokenizer and context.

Layout: a JSON header, with a sum over all that follows, padded to 4096 bytes, the tokens of all
samples end to end, then for each sample where it starts (one more for the end), and how many
targets it has.
"""

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from io import BufferedRandom, BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np

from tpukit.errors import DataError
from tpukit.io.files import replacing, sha256_of
from tpukit.io.folders import cache_folder
from tpukit.io.lock import exclusive
from tpukit.io.process import allowed_cores
from tpukit.io.progress import Progress
from tpukit.io.workers import map_ordered
from tpukit.tasks.llm.data.prompt import SUMMARIES, Example, PromptFormat, PromptStyle
from tpukit.tasks.llm.data.rows import Row, read_rows
from tpukit.tasks.llm.data.tokenizer import Tokenizer, tokenizer_from_bytes

FORMAT = 13
"""Changes with the layout, and where a style gives other tokens."""
LEARNED = np.uint32(2**31)
"""Flag of a token that is learned, in files whose targets are not a sample's last tokens."""
HEADER_BYTES = 4096
ROWS_A_CHUNK = 500
CHUNKS_WORTH_WORKERS = 4
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class SampleSizes:
    """How long each sample is, and how many of its tokens are targets."""

    lengths: Array
    targets: Array

    def __len__(self) -> int:
        return len(self.lengths)


@dataclass(frozen=True)
class TokenCache:
    """The samples of one file, whose arrays are views of the mapped file, or of examples."""

    tokens: Array
    starts: Array
    """int64 (samples + 1,)"""
    targets: Array
    """int32 (samples,): how many of a sample's last tokens are learned."""
    skipped: int = 0
    """Rows left out because their summary is too long."""
    flagged: bool = False
    """Whether learned tokens have the flag `LEARNED`; else they are a sample's last."""
    path: Path | None = None

    @classmethod
    def of(cls, examples: Sequence[Example], dtype: type = np.uint32) -> Self:
        """Of examples in memory; those whose learned tokens are flagged need uint32."""
        flags = [example.learned for example in examples if example.learned is not None]
        tokens: Array = np.array([token for e in examples for token in e.tokens], dtype)
        if flags:
            tokens |= np.where(np.concatenate(flags), LEARNED, np.uint32(0))
        starts = np.cumsum([0, *(len(example.tokens) for example in examples)])
        targets = np.array([example.targets for example in examples], np.int32)
        return cls(tokens, starts, targets, flagged=bool(flags))

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def lengths(self) -> Array:
        """int64 (samples,): tokens of each sample, prompt and targets."""
        lengths: Array = np.diff(self.starts)
        return lengths

    def example(self, index: int) -> tuple[Array, int, Array | None]:
        """The tokens of a sample, its number of targets and, where these are not its last tokens,
        which they are: bool (length,)."""
        tokens = self.tokens[self.starts[index] : self.starts[index + 1]]
        if not self.flagged:
            return tokens, int(self.targets[index]), None
        return tokens & ~LEARNED, int(self.targets[index]), tokens >= LEARNED


def open_token_cache(
    csv_path: Path,
    tokenizer: Tokenizer,
    block_size: int,
    progress: Progress | None = None,
    style: PromptStyle = SUMMARIES,
) -> TokenCache:
    """The tokens of `csv_path`, built on first use; other processes wait for the one that builds.

    A build that is killed leaves nothing that is taken for a cache. Raises `DataError` for what
    the file holds, and where the cache cannot be written.
    """
    path = cache_folder() / "tokens" / f"{_key(csv_path, tokenizer, block_size, style)}.tokens"
    try:
        with exclusive(path.with_suffix(".lock"), wait=True):
            cache = _open(path)
            if cache is None:
                _build(path, csv_path, PromptFormat(tokenizer, block_size, style), progress)
                cache = _open(path)
    except OSError as error:
        raise DataError(
            f"Cannot write the token cache {path}: {error.strerror or error}.",
            "Set TPUKIT_CACHE_DIR to a folder with room.",
        ) from error
    assert cache is not None
    if len(cache) == 0:
        raise DataError(
            f"{csv_path}: all {cache.skipped} rows are {style.too_long(block_size)}.",
            "Raise --block-size.",
        )
    return cache


def file_digest(path: Path) -> str:
    """The sha256 of a file. Raises `DataError` where it cannot be read."""
    try:
        return sha256_of(path)
    except OSError as error:
        raise DataError(
            f"Cannot read {path}: {error.strerror}.",
            "`tpukit data dialogues --out DIR` makes files to try with.",
        ) from error


def _key(csv_path: Path, tokenizer: Tokenizer, block_size: int, style: PromptStyle) -> str:
    tokens = hashlib.sha256(tokenizer.to_bytes()).hexdigest()
    parts = f"{FORMAT}/{file_digest(csv_path)}/{tokens}/{block_size}/{style}"
    return hashlib.sha256(parts.encode()).hexdigest()[:32]


def _open(path: Path) -> TokenCache | None:
    """The cache; None where there is none, or a damaged one."""
    if not path.exists():
        return None
    try:
        with path.open("rb") as file:
            header = json.loads(file.read(HEADER_BYTES).rstrip(b"\0"))
            if header.pop("sha256") != _digest(file, header):
                return None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    samples = header["samples"]
    data = np.memmap(path, np.uint8, "r")
    places = _places(header)
    return TokenCache(
        _view(data, places[0], header["tokens"], np.dtype(header["dtype"])),
        _view(data, places[1], samples + 1, np.dtype(np.int64)),
        _view(data, places[2], samples, np.dtype(np.int32)),
        header["skipped"],
        header["flagged"],
        path,
    )


def _places(header: dict[str, Any]) -> list[int]:
    """Byte offsets of tokens, starts and targets, each aligned to 8."""
    sizes = [header["tokens"] * np.dtype(header["dtype"]).itemsize, (header["samples"] + 1) * 8]
    aligned = (-(-size // 8) * 8 for size in sizes)
    return list(itertools.accumulate(aligned, initial=HEADER_BYTES))


def _digest(file: BufferedReader | BufferedRandom, header: dict[str, Any]) -> str:
    """The sum of a header's fields and of what follows it in the file."""
    file.seek(HEADER_BYTES)
    found = hashlib.file_digest(file, "sha256")
    found.update(json.dumps(header, sort_keys=True).encode())
    return found.hexdigest()


def _view(data: Array, start: int, count: int, dtype: np.dtype[Any]) -> Array:
    view: Array = data[start : start + count * dtype.itemsize].view(dtype)
    return view


# -- building ------------------------------------------------------------------------------------
def _build(path: Path, csv_path: Path, prompts: PromptFormat, progress: Progress | None) -> None:
    columns = prompts.style.columns
    small = prompts.tokenizer.vocabulary_size <= 2**16 and not columns.flags_learned
    dtype = np.uint16 if small else np.uint32
    rows = read_rows(csv_path, summaries=True, pairs=True, columns=columns)
    with replacing(path) as unfinished, unfinished.open("w+b") as file:
        file.write(b"\0" * HEADER_BYTES)
        header = _write_samples(file, rows, prompts, dtype, progress)
        header["sha256"] = _digest(file, header)
        file.seek(0)
        file.write(json.dumps(header).encode().ljust(HEADER_BYTES, b"\0"))


def _write_samples(
    file: BinaryIO,
    rows: Iterable[Row],
    prompts: PromptFormat,
    dtype: type,
    progress: Progress | None,
) -> dict[str, Any]:
    starts, targets = [np.zeros(1, np.int64)], []
    done = tokens = 0
    for chunk in encoded_chunks(rows, prompts):
        kept = TokenCache.of([example for example in chunk if example is not None], dtype)
        file.write(kept.tokens.tobytes())
        starts.append(tokens + kept.starts[1:])
        targets.append(kept.targets)
        tokens += len(kept.tokens)
        done += len(chunk)
        if progress is not None:
            progress.update(done)
    file.write(b"\0" * (-file.tell() % 8))
    for arrays in (starts, targets):
        file.write(np.concatenate(arrays).tobytes())
        file.write(b"\0" * (-file.tell() % 8))
    samples = sum(map(len, targets))
    return {
        "samples": samples,
        "tokens": tokens,
        "dtype": np.dtype(dtype).name,
        "skipped": done - samples,
        "flagged": prompts.style.columns.flags_learned,
    }


def encoded_chunks(rows: Iterable[Row], prompts: PromptFormat) -> Iterator[list[Example | None]]:
    """The rows in order as examples, a chunk at a time, on all cores where it pays."""
    rows = iter(rows)
    chunks = iter(lambda: list(itertools.islice(rows, ROWS_A_CHUNK)), [])
    start = list(itertools.islice(chunks, CHUNKS_WORTH_WORKERS))
    everything, cores = itertools.chain(start, chunks), allowed_cores()
    if len(start) < CHUNKS_WORTH_WORKERS or cores == 1:
        return ([prompts.example(row) for row in chunk] for chunk in everything)
    worker = partial(
        _encode_in_worker, prompts.tokenizer.to_bytes(), prompts.block_size, prompts.style
    )
    return map_ordered(worker, everything, cores)


def _encode_in_worker(
    tokenizer: bytes, block_size: int, style: PromptStyle, rows: list[Row]
) -> list[Example | None]:
    prompts = _format_in_worker(tokenizer, block_size, style)
    return [prompts.example(row) for row in rows]


@lru_cache(1)
def _format_in_worker(tokenizer: bytes, block_size: int, style: PromptStyle) -> PromptFormat:
    """Made once in a worker: a tokenizer takes longer to build than a chunk to encode."""
    return PromptFormat(tokenizer_from_bytes(tokenizer, "the tokenizer"), block_size, style)
