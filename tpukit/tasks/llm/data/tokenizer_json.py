"""A byte-level BPE as Hugging Face's tokenizer.json."""

from collections.abc import Mapping
from typing import Any

from tpukit.tasks.llm.data.tokenizer import END_OF_TEXT, GPT2_PATTERN, Tokenizer


def byte_ranks(vocabulary: Mapping[str, int]) -> dict[bytes, int]:
    """Tokens in GPT-2's byte alphabet as bytes, in the order of their numbers."""
    ordered = sorted(vocabulary.items(), key=lambda item: item[1])
    return {bytes(map(_BYTE_OF_CHARACTER.__getitem__, token)): rank for token, rank in ordered}


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
