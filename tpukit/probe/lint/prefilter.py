"""Finds out from a file's bytes whether it may contain a finding, far faster than parsing it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from tpukit.knowledge.calls import OldCall, call_table, old_calls

_WORD = frozenset(bytes([byte]) for byte in range(128) if chr(byte).isalnum()) | {b"_"}


def may_concern(data: bytes) -> bool:
    """Whether a file may contain a finding: most files need not be parsed."""
    if may_hold_habits(data):
        return True
    variables = _words_without_import()
    return any(
        any(sign.is_in(data) for sign in signs)
        for package, signs in _signs_by_package().items()
        if package in data and (package.decode() in variables or imports(data, package))
    )


@cache
def _words_without_import() -> frozenset[str]:
    """Variables, and what shell lines show."""
    shell = (name for row in old_calls() if row.kind == "shell" for name in row.names)
    return frozenset((*call_table().environment, *shell))


def may_hold_habits(data: bytes) -> bool:
    """Whether a file may contain a habit: it uses torch_xla, or an Accelerator."""
    if imports(data, b"torch_xla"):
        return True
    return b"Accelerator" in data and imports(data, b"accelerate")


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


@dataclass(frozen=True)
class Sign:
    """What a file contains if it uses some row; tested in this order, the fastest first."""

    word: bytes
    beside: frozenset[bytes]
    """One of these must occur too (the functions of a keyword); empty: no condition."""
    forms: re.Pattern[bytes]
    """The forms in which the word may occur."""

    def is_in(self, data: bytes) -> bool:
        if self.word not in data or (self.beside and not any(b in data for b in self.beside)):
            return False
        return self.forms.search(data) is not None


@dataclass
class _Forms:
    """A sign under construction."""

    beside: set[str] = field(default_factory=set)
    forms: set[str] = field(default_factory=set)


@cache
def _signs_by_package() -> Mapping[bytes, Sequence[Sign]]:
    """Package (or variable) -> what else a file that imports it (or names it) must contain."""
    signs: dict[str, dict[str, _Forms]] = {}
    for row in old_calls():
        for name in row.names:
            whole = row.kind == "shell"
            words = signs.setdefault(name if whole else name.partition(".")[0], {})
            for word, forms in _signs(row, name).items():
                sign = words.setdefault(word, _Forms())
                sign.forms |= forms
                sign.beside |= {name.rpartition(".")[2]} if word in row.keywords else set()
    return {
        package.encode(): [
            Sign(word.encode(), frozenset(b.encode() for b in sign.beside), _pattern(sign.forms))
            for word, sign in words.items()
        ]
        for package, words in signs.items()
    }


_SPECIFIC = 9
"""A name of this length, or with an underscore inside, is specific enough alone; a shorter one must
follow its module's name, or stand in an import from it."""


def _signs(row: OldCall, name: str) -> dict[str, set[str]]:
    """Word -> the forms in which it occurs in a file that uses this name."""
    if row.kind == "shell" or row.signs:
        word = name if row.kind == "shell" else name.rpartition(".")[2]
        return {word: set(row.signs) or {re.escape(name)}}
    if row.keywords:
        spawn = {"spawn": {r"\bspawn\s*\("}} if row.position is not None else {}
        return {**{keyword: {rf"\b{keyword}\s*="} for keyword in row.keywords}, **spawn}
    parent, _, last = name.rpartition(".")
    if not parent or row.kind == "module":
        return {last: {rf"\b{re.escape(last)}\b"}}
    if len(last) >= _SPECIFIC or "_" in last[1:-1]:
        # Called, or bound to another name.
        called = {rf"\b{last}\s*(?:\(|as\b)", rf"=\s*[\w.]*\b{last}\b"}
        is_call = row.kind == "call" and len(last) >= _SPECIFIC
        return {last: called if is_call else {rf"\b{last}\b"}}
    return {last: _short_forms(parent, last)}


def _short_forms(parent: str, last: str) -> set[str]:
    """`module.last` under the module's common short names, and `from module import last`."""
    module = parent.rpartition(".")[2].rstrip("()")
    is_class = module[:1].isupper()
    short = r"\w+" if is_class else r"np|th|xm|xr|nn|init"
    # Under another name it may be called anything.
    renamed = rf"\b{module}\s+as\b" if is_class else rf"\b{module}\s+as\s+(?!(?:{short})\b)"
    source = re.escape(parent)
    return {
        renamed,
        rf"\b(?:{module}|{short})(?:\(\))?\.{last}\b",
        rf"\bgetattr\([^)]*[\"']{last}\b",
        rf"\bfrom\s+{source}\s+import\b[^\n(]*\b{last}\b",
        rf"\bfrom\s+{source}\s+import\s*\((?:[^)]*\b)?{last}\b",
    }


def _pattern(words: set[str]) -> re.Pattern[bytes]:
    return re.compile("|".join(sorted(words)).encode())
