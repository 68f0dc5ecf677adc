"""Rules out files by their words, which takes far less time than parsing them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property

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
_GAP = rb"(?:[\s\\)]|#[^\n]*\n)*"
"""What may stand around the dot of `a.b` and `(a).b`."""
_STAR = re.compile(rb"from\s+\w[\w.]*\s+import\s*\*")
_IMPORTED = re.compile(rb"\bimport\b\s*(\((?:[^)#]|#[^\n]*\n)*\)|[^\n]*(?:\\\r?\n[^\n]*)*)")
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
    if not words.isdisjoint(_form_words()) and imports(data, b"torch"):
        text = data.decode("utf-8", errors="replace")
        if any(form.search(text) for form in call_table().forms):
            return True
    shown = _Shown(data, words)
    return any(
        (package is None or imports(data, package))
        and any(use.words <= words and shown.may_show(use) for use in uses)
        for package, uses in _uses_by_package().items()
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


@dataclass(frozen=True)
class _Use:
    """What a file that uses a row has."""

    words: Words
    """All of them: every part of the qualified name stands in an import, a use or a text."""
    parent: bytes = b""
    """The name's part before the last; empty where the words are all that is known."""
    last: bytes = b""


class _Shown:
    """Whether one file may write `parent.last`, under whatever name it gives the parent."""

    def __init__(self, data: bytes, words: Words) -> None:
        self._data = data
        self._words = words

    def may_show(self, use: _Use) -> bool:
        if not use.parent or self._has_star or use.last in self._imported:
            return True
        quoted = re.compile(rb"[\"'](?:%b|%b)[\"']" % (use.parent, use.last))
        if b"getattr" in self._words and quoted.search(self._data):
            return True
        bases = {use.parent, *_renamed(use.parent).findall(self._data)}
        return any(
            _chain(base, use.last).search(self._data) or _alias(base).search(self._data)
            for base in bases
        )

    @cached_property
    def _has_star(self) -> bool:
        return _STAR.search(self._data) is not None

    @cached_property
    def _imported(self) -> Words:
        return _words(b" ".join(_IMPORTED.findall(self._data)))


@cache
def _renamed(base: bytes) -> re.Pattern[bytes]:
    return re.compile(rb"%b\s+as\s+(\w+)" % base)


@cache
def _chain(base: bytes, last: bytes) -> re.Pattern[bytes]:
    return re.compile(rb"%b%b\.%b%b\b" % (base, _GAP, _GAP, last))


@cache
def _alias(base: bytes) -> re.Pattern[bytes]:
    """`x = base`, `x = package.base`: what follows is written as `x.last`."""
    return re.compile(rb"=[\s(\\]*(?:\w+\s*\.\s*)*%b\b(?!\s*[.(])" % base)


@cache
def _form_words() -> Words:
    """The methods of calls without a qualified name."""
    forms = call_table().by_form.values()
    return frozenset(name.rpartition(".")[2].encode() for row in forms for name in row.names)


@cache
def _uses_by_package() -> dict[bytes | None, frozenset[_Use]]:
    """Package -> uses, one of which a file with a finding has; None: without an import (variables,
    and what shell lines show)."""
    found: dict[bytes | None, set[_Use]] = {}
    for package, use in _needed():
        found.setdefault(package, set()).add(use)
    return {package: frozenset(uses) for package, uses in found.items()}


def _needed() -> Iterator[tuple[bytes | None, _Use]]:
    variables = call_table().environment
    for row in old_calls():
        for name in row.names:
            words = _words(name.encode())
            package, _, _ = name.partition(".")
            if row.kind == "shell" or package in variables:
                yield None, _Use(words)
                continue
            if row.kind == "form":
                continue
            of_object = "(" in name or "." not in name
            shown = () if of_object else tuple(name.encode().split(b".")[-2:])
            for keyword in row.keywords:
                yield package.encode(), _Use(words | {keyword.encode()}, *shown)
            # An argument by position has no keyword.
            if not row.keywords or row.position is not None:
                yield package.encode(), _Use(words, *shown)
