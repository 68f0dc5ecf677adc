"""Rules out files by their bytes: of library code one file in 25 needs to be parsed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from tpukit.knowledge.calls import OldCall, call_table, old_calls

_WORD = frozenset(bytes([byte]) for byte in range(128) if chr(byte).isalnum()) | {b"_"}
_BETWEEN_WORDS = bytes(
    byte if byte > 127 or bytes([byte]) in _WORD else ord(" ") for byte in range(256)
)


_MOVES = re.compile(rb"[\"']xla\b|\b(?:PJRT_DEVICE|XLA_[A-Z]|PT_XLA_)")


def may_concern(data: bytes, *, moves: bool = False) -> bool:
    """Whether a file may contain a finding: most files need not be parsed.

    moves: one of `move_table`.
    """
    # Source inside a text (a notebook's, say) writes its newlines so.
    data = data.replace(b"\\n", b"\n")
    if may_hold_habits(data) or (moves and _MOVES.search(data)):
        return True
    variables = _words_without_import()
    words = _words(data)
    return any(
        any(sign.is_in(data, words) for sign in signs)
        for package, (parts, signs) in _signs_by_package().items()
        if parts <= words and (package.decode() in variables or imports(data, package))
    )


def _words(data: bytes) -> frozenset[bytes]:
    """Every word that occurs; many tests of one set take less time than searches in the file."""
    return frozenset(data.translate(_BETWEEN_WORDS).split())


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
    """The text that a file contains if it uses some row; tested in this order, fastest first."""

    words: frozenset[bytes]
    """All of these must occur: one, but for a name with dots."""
    beside: frozenset[bytes]
    """One of these must occur too (the functions of a keyword); empty: no condition."""
    anywhere: re.Pattern[bytes] | None
    """Forms without the word: with a module under another name it may be called anything."""
    whole: re.Pattern[bytes]
    """The word alone: `eig`, not `weight`."""
    around: re.Pattern[bytes] | None
    """The forms in which the word may occur."""

    def is_in(self, data: bytes, words: frozenset[bytes]) -> bool:
        """Whether a file that consists of these words has one of the forms."""
        if not self.words <= words or (self.beside and not self.beside & words):
            return False
        if self.anywhere is not None and self.anywhere.search(data):
            return True
        around = self.around
        return around is not None and any(
            around.search(data, _statement_start(data, match.start()), match.end() + _AFTER)
            for match in self.whole.finditer(data)
        )


_AFTER = 80
"""Number of characters after a word that its forms may match."""


def _statement_start(data: bytes, at: int) -> int:
    """Start of the line, or of the line with the bracket that is open here (a list of imports)."""
    bracket = data.rfind(b"(", 0, at)
    if bracket > data.rfind(b")", 0, at):
        at = bracket
    return data.rfind(b"\n", 0, at) + 1


@dataclass
class _Forms:
    """A sign under construction."""

    anywhere: set[str] = field(default_factory=set)
    around: set[str] = field(default_factory=set)
    beside: set[str] = field(default_factory=set)

    def add(self, other: _Forms) -> None:
        self.anywhere |= other.anywhere
        self.around |= other.around
        self.beside |= other.beside

    def sign(self, word: str) -> Sign:
        # With the word itself in front, the search jumps from one to the next.
        whole = re.compile(rf"{re.escape(word)}(?!\w)(?<!\w{re.escape(word)})".encode())
        beside = frozenset(b.encode() for b in self.beside)
        words = _words(word.encode())
        return Sign(words, beside, _pattern(self.anywhere), whole, _pattern(self.around))


@cache
def _signs_by_package() -> Mapping[bytes, tuple[frozenset[bytes], Sequence[Sign]]]:
    """Package (or variable) -> what else a file that imports it (or names it) must contain."""
    signs: dict[str, dict[str, _Forms]] = {}
    for row in old_calls():
        for name in row.names:
            whole = row.kind == "shell"
            words = signs.setdefault(name if whole else name.partition(".")[0], {})
            for word, forms in _signs(row, name).items():
                words.setdefault(word, _Forms()).add(forms)
    return {
        package.encode(): (
            _words(package.encode()),
            [forms.sign(word) for word, forms in words.items()],
        )
        for package, words in signs.items()
    }


_SPECIFIC = 9
"""Minimum length of a name that is specific by itself (or has an underscore inside); a shorter one
must follow its module's name, or stand in an import from it."""


def _signs(row: OldCall, name: str) -> dict[str, _Forms]:
    """Word -> the forms in which it occurs in a file that uses this name."""
    parent, _, last = name.rpartition(".")
    if row.kind == "shell" or row.signs:
        word = name if row.kind == "shell" else last
        return {word: _Forms(anywhere=set(row.signs) or {re.escape(name)})}
    if row.keywords:
        found = {
            keyword: _Forms(around={rf"\b{keyword}\s*="}, beside={last}) for keyword in row.keywords
        }
        if row.position is not None:
            found["spawn"] = _Forms(around={r"\bspawn\s*\("})
        return found
    if not parent:
        return {last: _Forms(around={rf"\b{re.escape(last)}\b"})}
    if row.kind != "module" and (len(last) >= _SPECIFIC or "_" in last[1:-1]):
        # Called, or bound to another name.
        called = {rf"\b{last}\s*(?:\(|as\b)", rf"=\s*[\w.]*\b{last}\b"}
        is_call = row.kind == "call" and len(last) >= _SPECIFIC
        return {last: _Forms(around=called if is_call else {rf"\b{last}\b"})}
    return {last: _short_forms(parent, last)}


def _short_forms(parent: str, last: str) -> _Forms:
    """`module.last` under the module's common short names, and `from module import last`."""
    module = parent.rpartition(".")[2].rstrip("()")
    is_class = module[:1].isupper()
    short = r"\w+" if is_class else r"np|th|xm|xr|nn|init"
    source = re.escape(parent)
    around = {
        rf"\b(?:{module}|{short})(?:\(\))?\.{last}\b",
        rf"\bgetattr\([^)]*[\"']{last}\b",
        rf"\bfrom\s+{source}\s+import\b[^\n(]*\b{last}\b",
        rf"\bfrom\s+{source}\s+import\s*\((?:[^)]*\b)?{last}\b",
    }
    renamed = rf"{module}\s+as\b" if is_class else rf"{module}\s+as\s+(?!(?:{short})\b)"
    return _Forms({renamed}, around)


def _pattern(words: set[str]) -> re.Pattern[bytes] | None:
    return re.compile("|".join(sorted(words)).encode()) if words else None
