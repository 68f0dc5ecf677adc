"""Byte-level BPE through tiktoken."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile

import tiktoken

from tpukit.errors import DataError

END_OF_TEXT = "<|endoftext|>"
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""


def first_tokens(encode: Callable[[str], list[int]], text: str, limit: int) -> list[int]:
    """The first `limit` tokens of `text`, without reading much further (fields of 10 MB)."""
    characters = limit * 8
    while True:
        tokens = encode(text[:characters])
        if len(tokens) > limit or characters >= len(text):
            return tokens[:limit]
        characters *= 4


@dataclass(frozen=True)
class Tokenizer:
    """A byte-level BPE: the bytes of each token by rank, and the end token after them."""

    ranks: Mapping[bytes, int]
    end: int
    """The id of `<|endoftext|>`."""

    @property
    def vocabulary_size(self) -> int:
        return max(self.end, *self.ranks.values()) + 1

    @property
    def ends(self) -> frozenset[int]:
        """The tokens that end an answer."""
        return frozenset([self.end])

    @cached_property
    def encoding(self) -> tiktoken.Encoding:
        return tiktoken.Encoding(
            "tpukit",
            pat_str=GPT2_PATTERN,
            mergeable_ranks=dict(self.ranks),
            special_tokens={END_OF_TEXT: self.end},
        )

    def encode(self, text: str) -> list[int]:
        """The tokens of `text`; the end token is never among them, whatever the text says."""
        tokens: list[int] = self.encoding.encode_ordinary(text)
        return tokens

    def encode_parts(self, texts: Sequence[str]) -> list[int]:
        """The tokens of the texts together."""
        return self.encode("".join(texts))

    def decode(self, tokens: Iterable[int]) -> str:
        """Text up to the end token; invalid UTF-8 become U+FFFD."""
        text: str = self.encoding.decode([*takewhile(lambda token: token != self.end, tokens)])
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
            try:
                if line.strip():
                    token, rank = line.split()
                    ranks[base64.b64decode(token, validate=True)] = int(rank)
            except ValueError as error:
                raise DataError(
                    f"{source}, line {number}: expected a base64 token and its rank.",
                    "Give a .tiktoken file or a tokenizer.json.",
                ) from error
        end = ranks.pop(END_OF_TEXT.encode(), None)
        require_all_bytes(ranks, source)
        return cls(ranks, max(ranks.values()) + 1 if end is None else end)


def require_all_bytes(ranks: Mapping[bytes, int], source: str) -> None:
    """Raises `DataError` where a byte has no token."""
    missing = sum(bytes([byte]) not in ranks for byte in range(256))
    if missing:
        raise DataError(
            f"{source}: {missing} of the 256 single bytes have no token.",
            "tpukit needs a byte-level BPE such as GPT-2's: it must take any text.",
        )
