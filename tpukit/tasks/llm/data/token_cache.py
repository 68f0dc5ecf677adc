"""A training file as tokens: a memory-mapped safetensors file, keyed by content, tokenizer and
context, with a sum over all that it holds.
"""

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Self

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from tpukit.errors import DataError
from tpukit.io.files import sha256_of, write_file
from tpukit.io.folders import cache_folder
from tpukit.io.lock import exclusive
from tpukit.io.process import allowed_cores
from tpukit.io.progress import Progress
from tpukit.io.workers import map_ordered
from tpukit.tasks.llm.data.prompt import SUMMARIES, Example, PromptFormat, PromptStyle
from tpukit.tasks.llm.data.rows import Row, read_rows
from tpukit.tasks.llm.data.tokenizer import Tokenizer

FORMAT = 11
"""Changes with the layout, and where a style gives other tokens."""
LEARNED = np.uint32(2**31)
"""Flag of a token that is learned, in files whose targets are not a sample's last tokens."""
NAMES = ("tokens", "starts", "targets")
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
        with safe_open(path, "pt") as file:  # of which NumPy's way copies
            said: dict[str, str] = file.metadata()
            tokens, starts, targets = (file.get_tensor(name).numpy() for name in NAMES)
        if said.pop("sha256") != _digest((tokens, starts, targets), said):
            return None
    except (SafetensorError, ValueError, LookupError, TypeError, AttributeError):
        return None
    tokens = tokens.view(f"u{tokens.dtype.name}")
    return TokenCache(tokens, starts, targets, int(said["skipped"]), "flagged" in said, path)


def _digest(arrays: Iterable[Array], said: Mapping[str, str]) -> str:
    """The sum of arrays and of what is said of them."""
    found = hashlib.sha256(json.dumps(said, sort_keys=True).encode())
    for array in arrays:
        found.update(array.data)
    return found.hexdigest()


# -- building ------------------------------------------------------------------------------------
def _build(path: Path, csv_path: Path, prompts: PromptFormat, progress: Progress | None) -> None:
    columns = prompts.style.columns
    small = prompts.tokenizer.vocabulary_size <= 2**16 and not columns.flags_learned
    parts, done = [], 0
    rows = read_rows(csv_path, summaries=True, pairs=True, columns=columns)
    for chunk in encoded_chunks(rows, prompts):
        kept = [example for example in chunk if example is not None]
        parts.append(TokenCache.of(kept, np.uint16 if small else np.uint32))
        done += len(chunk)
        if progress is not None:
            progress.update(done)
    lengths = np.concatenate([part.lengths for part in parts])
    arrays = (
        # Releases of safetensors differ in unsigned types.
        np.concatenate([part.tokens for part in parts]).view(np.int16 if small else np.int32),
        np.append(0, lengths.cumsum()),
        np.concatenate([part.targets for part in parts]),
    )
    said = {"skipped": str(done - len(lengths))}
    if columns.flags_learned:
        said["flagged"] = ""
    said["sha256"] = _digest(arrays, said)
    write_file(path, save(dict(zip(NAMES, arrays, strict=True)), said))


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
    return PromptFormat(Tokenizer.from_bytes(tokenizer), block_size, style)
