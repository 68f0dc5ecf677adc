"""Rules out files by their words, which takes far less time than parsing them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

from tpukit.knowledge.calls import call_table, old_calls
from tpukit.probe.lint.mistakes import MAY_HOLD

_WORD = frozenset(bytes([byte]) for byte in range(128) if chr(byte).isalnum()) | {b"_"}
_BETWEEN_WORDS = bytes(
    byte if byte > 127 or bytes([byte]) in _WORD else ord(" ") for byte in range(256)
)
_MOVES = {
    "torch_tpu": re.compile(rb"[\"']xla\b|\b(?:PJRT_DEVICE|XLA_[A-Z]|PT_XLA_)"),
    "tpu": re.compile(rb"\b(?:import|from) (?:torch|triton|flash_attn|bitsandbytes|apex)\b"),
}
Words = frozenset[bytes]


def may_concern(data: bytes, *, moves: str = "") -> bool:
    """Whether a file may contain a finding: most files need not be parsed.

    moves: one of `move_table`.
    """
    # Source inside a string (a notebook's, say) has its newlines in this form.
    data = data.replace(b"\\n", b"\n")
    if may_hold_habits(data) or may_hold_mistakes(data) or (moves and _MOVES[moves].search(data)):
        return True
    words = _words(data)
    return any(
        (package is None or imports(data, package)) and any(each <= words for each in alternatives)
        for package, alternatives in _words_by_package().items()
    )


def may_hold_habits(data: bytes) -> bool:
    """Whether a file may contain a habit: it uses torch_xla, or an Accelerator."""
    if imports(data, b"torch_xla"):
        return True
    return b"Accelerator" in data and imports(data, b"accelerate")


def may_hold_mistakes(data: bytes) -> bool:
    """Whether a file may contain a mistake of training code."""
    may = any(word in data and rest.search(data) for word, rest in MAY_HOLD.items())
    return may and imports(data, b"torch")


def imports(data: bytes, package: bytes) -> bool:
    """Whether a package stands behind an `import` or `from` on any line."""
    at = data.find(package)
    while at >= 0:
        end = at + len(package)
        if data[end : end + 1] not in _WORD:
            start = data.rfind(b"\n", 0, at) + 1
            line = data[start:at]
            # A continuation line may be part of an import.
            if b"import" in line or b"from" in line or data[start - 2 : start] == b"\\\n":
                return True
        at = data.find(package, end)
    return False


def _words(data: bytes) -> Words:
    """Every word of a file, as a set that is faster to test than the text."""
    return frozenset(data.translate(_BETWEEN_WORDS).split())


@cache
def _words_by_package() -> dict[bytes | None, frozenset[Words]]:
    """Package -> sets of words, one of which a file that uses a row has; None: without an import
    (variables, and what shell lines show)."""
    found: dict[bytes | None, set[Words]] = {}
    for package, words in _needed_words():
        found.setdefault(package.encode() if package else None, set()).add(words)
    return {package: frozenset(alternatives) for package, alternatives in found.items()}


def _needed_words() -> Iterator[tuple[str | None, Words]]:
    variables = call_table().environment
    for row in old_calls():
        for name in row.names:
            package, _, _ = name.partition(".")
            if row.kind == "shell" or package in variables:
                yield None, _words(name.encode())
                continue
            last = name.rpartition(".")[2].encode()
            for keyword in row.keywords:
                yield package, _words(last + b" " + keyword.encode())
            # An argument by position has no keyword.
            if not row.keywords or row.position is not None:
                yield package, _words(last)
