"""Hugging Face's tokenizer.json, read and written."""

import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from tpukit.errors import DataError
from tpukit.tasks.summarize.data.tokenizer import (
    END_OF_TEXT,
    GPT2_PATTERN,
    Tokenizer,
    require_all_bytes,
)


def from_tokenizer_json(content: bytes, source: str) -> Tokenizer:
    """Reads a tokenizer.json. Raises `DataError` where it is not a byte-level BPE."""
    try:
        return _read(json.loads(content), source)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{source} is not a byte-level BPE tokenizer.json.",
            "Give the tokenizer.json of a GPT-2 model, or a .tiktoken file.",
        ) from error


def cuts_otherwise(content: bytes) -> bool:
    """Whether a tokenizer.json has other rules than GPT-2's, adds tokens to texts, or has more
    special tokens."""
    try:
        parsed = json.loads(content)
        rules, added = parsed["pre_tokenizer"] or {}, parsed.get("added_tokens") or []
        *cuts, last = rules.get("pretokenizers", [rules])
        patterns = [(cut.get("pattern") or {}).get("Regex") for cut in cuts]
        after = parsed.get("post_processor") or last
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return False
    known = patterns == ([] if last.get("use_regex", True) else [GPT2_PATTERN])
    known = known and last.get("type") == "ByteLevel" and not last.get("add_prefix_space")
    adds = parsed.get("normalizer") or after.get("type") != "ByteLevel"
    return not known or bool(adds) or not {token["content"] for token in added} <= {END_OF_TEXT}


def _read(parsed: Mapping[str, Any], source: str) -> Tokenizer:
    added = {token["content"]: token["id"] for token in parsed.get("added_tokens") or []}
    vocabulary = {**parsed["model"]["vocab"], **added}
    merges = [m.split(" ") if isinstance(m, str) else m for m in parsed["model"]["merges"]]
    end = int(vocabulary.pop(END_OF_TEXT, max(vocabulary.values()) + 1))
    ranks = {
        _to_raw_bytes(token, source): rank
        for token, rank in sorted(vocabulary.items(), key=lambda item: item[1])
    }
    require_all_bytes(ranks, source)
    # tiktoken merges by rank.
    ids = [vocabulary["".join(pair)] for pair in merges]
    if any(later < earlier for earlier, later in pairwise(ids)):
        raise DataError(
            f"{source}: its ids are not in the order of its merges.",
            "tpukit reads tokenizers whose ids grow with the merges, as GPT-2's do.",
        )
    return Tokenizer(ranks, end)


def _to_raw_bytes(token: str, source: str) -> bytes:
    try:
        return bytes(_BYTE_OF_CHARACTER[character] for character in token)
    except KeyError as error:
        raise DataError(
            f"{source}: token {token!r} is not written in the byte alphabet of GPT-2.",
            "tpukit needs a byte-level BPE such as GPT-2's.",
        ) from error


_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = sorted({*range(256)} - {*_PRINTABLE})
_CHARACTER_OF_BYTE = {byte: chr(byte) for byte in _PRINTABLE}
"""GPT-2's printable stand-in for each byte (Radford et al., 2019, `encoder.py`)."""
_CHARACTER_OF_BYTE |= {byte: chr(256 + number) for number, byte in enumerate(_OTHERS)}
_BYTE_OF_CHARACTER = {character: byte for byte, character in _CHARACTER_OF_BYTE.items()}


def pre_tokenizer() -> Any:
    """GPT-2's rules for the tokenizers library: its pattern cuts, then bytes become characters."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    cut = Split(Regex(GPT2_PATTERN), behavior="isolated")
    return Sequence([cut, ByteLevel(add_prefix_space=False, use_regex=False)])


def tokenizer_json(tokenizer: Tokenizer) -> str:
    """The text of a tokenizer.json that the tokenizers library reads."""
    from tokenizers import Tokenizer as Whole
    from tokenizers.decoders import ByteLevel
    from tokenizers.models import BPE

    vocabulary = {_printable(token): rank for token, rank in tokenizer.ranks.items()}
    merges: Any = [
        tuple(map(_printable, last_merge(token, tokenizer.ranks)))
        for token, _ in sorted(tokenizer.ranks.items(), key=lambda item: item[1])
        if len(token) > 1
    ]
    whole: Any = Whole(BPE({**vocabulary, END_OF_TEXT: tokenizer.end}, merges))
    whole.pre_tokenizer, whole.decoder = pre_tokenizer(), ByteLevel()
    whole.add_special_tokens([END_OF_TEXT])
    return str(whole.to_str())


def last_merge(token: bytes, ranks: Mapping[bytes, int]) -> list[bytes]:
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
    return "".join(_CHARACTER_OF_BYTE[byte] for byte in token)
