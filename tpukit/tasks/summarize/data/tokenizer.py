"""Byte-level BPE through tiktoken: GPT-2's own, a local file, or one trained on the data."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import tiktoken

from tpukit.errors import DataError

END_OF_TEXT = "<|endoftext|>"
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
DOWNLOAD_SECONDS = 60
BRING_A_FILE = (
    "Bring the file along: `tokenizer.json` of the Hugging Face repository `gpt2` (or a `.tiktoken`"
    " file) and give it with --tokenizer FILE; --tokenizer train needs no network at all."
)


@dataclass(frozen=True)
class Tokenizer:
    """A byte-level BPE: the bytes of each token by rank, and the end token after them."""

    ranks: Mapping[bytes, int]
    end: int
    """The id of `<|endoftext|>`."""

    @property
    def vocabulary_size(self) -> int:
        return max(self.end, *self.ranks.values()) + 1

    @cached_property
    def encoding(self) -> tiktoken.Encoding:
        return tiktoken.Encoding(
            "tpukit",
            pat_str=GPT2_PATTERN,
            mergeable_ranks=dict(self.ranks),
            special_tokens={END_OF_TEXT: self.end},
        )

    @cached_property
    def fingerprint(self) -> str:
        """Changes with anything that changes the tokens."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """The tokens of `text`; the end token is never among them, whatever the text says."""
        tokens: list[int] = self.encoding.encode_ordinary(text)
        return tokens

    def encode_start(self, text: str, limit: int) -> list[int]:
        """The first `limit` tokens of `text`, without reading much further (fields of 10 MB)."""
        characters = limit * 8
        while True:
            tokens = self.encode(text[:characters])
            if len(tokens) > limit or characters >= len(text):
                return tokens[:limit]
            characters *= 4

    def decode(self, tokens: Iterable[int]) -> str:
        """Text up to the end token; bytes that are no UTF-8 become U+FFFD."""
        kept: list[int] = []
        for token in tokens:
            if token == self.end:
                break
            kept.append(token)
        text: str = self.encoding.decode(kept)
        return text

    def to_bytes(self) -> bytes:
        """As a `.tiktoken` file: base64 of a token, its rank; the end token on the last line."""
        lines = [f"{base64.b64encode(t).decode()} {r}" for t, r in self.ranks.items()]
        lines.append(f"{base64.b64encode(END_OF_TEXT.encode()).decode()} {self.end}")
        return "\n".join(lines).encode()

    @classmethod
    def from_bytes(cls, content: bytes, source: str) -> Tokenizer:
        """Reads a `.tiktoken` file; without an end token, it comes after the last rank."""
        ranks: dict[bytes, int] = {}
        for number, line in enumerate(content.splitlines(), 1):
            if line.strip():
                token, rank = _tiktoken_line(line, source, number)
                ranks[token] = rank
        end = ranks.pop(END_OF_TEXT.encode(), None)
        _check_bytes_present(ranks, source)
        return cls(ranks, max(ranks.values()) + 1 if end is None else end)


def _tiktoken_line(line: bytes, source: str, number: int) -> tuple[bytes, int]:
    try:
        token, rank = line.split()
        return base64.b64decode(token, validate=True), int(rank)
    except ValueError as error:
        raise DataError(
            f"{source}, line {number}: expected a base64 token and its rank.",
            "Give a .tiktoken file or a tokenizer.json.",
        ) from error


def _check_bytes_present(ranks: Mapping[bytes, int], source: str) -> None:
    missing = sum(bytes([byte]) not in ranks for byte in range(256))
    if missing:
        raise DataError(
            f"{source}: {missing} of the 256 single bytes have no token.",
            "tpukit needs a byte-level BPE such as GPT-2's: it must take any text.",
        )


def load_tokenizer(name: str) -> Tokenizer:
    """`gpt2`, or a local `.tiktoken` or `tokenizer.json` file. Raises `DataError`."""
    if name == "gpt2":
        return _gpt2()
    path = Path(name)
    if path.is_dir():
        path = path / "tokenizer.json"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"No tokenizer at {path}: {error.strerror}.",
            "--tokenizer takes gpt2, train, or a .tiktoken or tokenizer.json file.",
        ) from error
    if path.suffix == ".json":
        return _from_tokenizer_json(content, str(path))
    return Tokenizer.from_bytes(content, str(path))


def _gpt2() -> Tokenizer:
    """tiktoken's; its first use downloads, in a child process that cannot hang this one."""
    fetch = [sys.executable, "-c", "import tiktoken; tiktoken.get_encoding('gpt2')"]
    try:
        done = subprocess.run(fetch, capture_output=True, timeout=DOWNLOAD_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise DataError(
            f"The GPT-2 tokenizer could not be downloaded in {DOWNLOAD_SECONDS} s.", BRING_A_FILE
        ) from None
    if done.returncode != 0:
        raise DataError(
            "The GPT-2 tokenizer is not here and could not be downloaded.", BRING_A_FILE
        )
    encoding = tiktoken.get_encoding("gpt2")
    return Tokenizer(encoding._mergeable_ranks, encoding.eot_token)


def train_tokenizer(texts: Iterable[str], vocabulary_size: int) -> Tokenizer:
    """A byte-level BPE trained on `texts` with the tokenizers library."""
    from tokenizers import Regex, pre_tokenizers
    from tokenizers import Tokenizer as Trained
    from tokenizers.models import BPE
    from tokenizers.trainers import BpeTrainer

    trained = Trained(BPE())
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(GPT2_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = BpeTrainer(
        vocab_size=vocabulary_size - 1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(iter(texts), trainer)
    return _from_tokenizer_json(trained.to_str().encode(), "the trained tokenizer")


def _from_tokenizer_json(content: bytes, source: str) -> Tokenizer:
    try:
        parsed = json.loads(content)
        model, vocabulary = parsed["model"], parsed["model"]["vocab"]
        merges = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{source} is not a byte-level BPE tokenizer.json.",
            "Give the tokenizer.json of a GPT-2 model, or a .tiktoken file.",
        ) from error
    end = _end_of(parsed, vocabulary)
    specials = {added["content"] for added in parsed.get("added_tokens") or []}
    ranks = {
        _to_raw_bytes(token, source): rank
        for token, rank in sorted(vocabulary.items(), key=lambda item: item[1])
        if token not in specials and token != END_OF_TEXT
    }
    _check_bytes_present(ranks, source)
    _check_merge_order(merges, vocabulary, source)
    return Tokenizer(ranks, end)


def _end_of(parsed: Mapping[str, Any], vocabulary: Mapping[str, int]) -> int:
    added = {token["content"]: int(token["id"]) for token in parsed.get("added_tokens") or []}
    taken = [*vocabulary.values(), *added.values()]
    known = added.get(END_OF_TEXT, vocabulary.get(END_OF_TEXT))
    return max(taken) + 1 if known is None else int(known)


def _check_merge_order(merges: Any, vocabulary: Mapping[str, int], source: str) -> None:
    """tiktoken merges by rank: ids must grow in the order of the merges."""
    ids = [vocabulary["".join(pair)] for pair in merges]
    if any(later < earlier for earlier, later in pairwise(ids)):
        raise DataError(
            f"{source}: its ids are not in the order of its merges.",
            "tpukit reads tokenizers whose ids grow with the merges, as GPT-2's do.",
        )


def _to_raw_bytes(token: str, source: str) -> bytes:
    try:
        return bytes(_BYTE_OF_CHARACTER[character] for character in token)
    except KeyError as error:
        raise DataError(
            f"{source}: token {token!r} is not written in the byte alphabet of GPT-2.",
            "tpukit needs a byte-level BPE such as GPT-2's.",
        ) from error


def _byte_alphabet() -> Iterator[tuple[str, int]]:
    """GPT-2's printable stand-in for each byte (Radford et al., 2019, `encoder.py`)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    shifted = 256
    for byte in range(256):
        if byte in printable:
            yield chr(byte), byte
        else:
            yield chr(shifted), byte
            shifted += 1


_BYTE_OF_CHARACTER = dict(_byte_alphabet())
_CHARACTER_OF_BYTE = {byte: character for character, byte in _BYTE_OF_CHARACTER.items()}


def character_of_byte(byte: int) -> str:
    """GPT-2's printable stand-in for a byte."""
    return _CHARACTER_OF_BYTE[byte]
