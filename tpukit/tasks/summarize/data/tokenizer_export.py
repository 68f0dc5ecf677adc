"""A tokenizer as Hugging Face's tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Mapping

from tpukit.tasks.summarize.data.tokenizer import (
    END_OF_TEXT,
    GPT2_PATTERN,
    Tokenizer,
    character_of_byte,
)


def tokenizer_json(tokenizer: Tokenizer) -> str:
    """The text of a tokenizer.json that the tokenizers library reads."""
    vocabulary = {_printable(token): rank for token, rank in tokenizer.ranks.items()}
    merges = [
        [_printable(part) for part in split_of(token, tokenizer.ranks)]
        for token, _ in sorted(tokenizer.ranks.items(), key=lambda item: item[1])
        if len(token) > 1
    ]
    end = {
        "id": tokenizer.end,
        "content": END_OF_TEXT,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    split = {"type": "Split", "pattern": {"Regex": GPT2_PATTERN}, "behavior": "Isolated"}
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [end],
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [
                    {**split, "invert": False},
                    {**byte_level, "use_regex": False},
                ],
            },
            "decoder": {**byte_level, "use_regex": True},
            "model": {
                "type": "BPE",
                "vocab": {**vocabulary, END_OF_TEXT: tokenizer.end},
                "merges": merges,
            },
        },
        ensure_ascii=False,
    )


def split_of(token: bytes, ranks: Mapping[bytes, int]) -> list[bytes]:
    """The two tokens that merge into `token`: what byte pair encoding makes of it just before."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        joined = [
            (ranks[parts[i] + parts[i + 1]], i)
            for i in range(len(parts) - 1)
            if parts[i] + parts[i + 1] in ranks
        ]
        place = min(joined)[1]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return parts


def _printable(token: bytes) -> str:
    return "".join(character_of_byte(byte) for byte in token)
