"""Which files of a folder may hold a finding, by their words: parsing takes longer."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from tpukit.knowledge.calls import call_table, old_calls
from tpukit.probe.lint.rules import RULES
from tpukit.probe.lint.shell_lines import SHELL_CALLS

_WORD = frozenset(bytes([byte]) for byte in range(128) if chr(byte).isalnum()) | {b"_"}
_BETWEEN_WORDS = bytes(
    byte if byte > 127 or bytes([byte]) in _WORD else ord(" ") for byte in range(256)
)
_MOVES = {
    "torch_tpu": re.compile(rb"[\"']xla\b|\b(?:PJRT_DEVICE|XLA_[A-Z]|PT_XLA_)"),
    "tpu": re.compile(
        rb"\b(?:import|from) (?:torch|triton|flash_attn|bitsandbytes|apex)\b|\.(?:backward|eval)\("
    ),
}
_HAVE_FORMS = (b"torch", b"transformers")
_GAP = rb"(?:[\s\\)]|#[^\n]*\n)*"
"""What may stand around the dot of `a.b` and `(a).b`."""
_compiled = cache(re.compile)
_IMPORTED = re.compile(
    rb"from\s+(\w[\w.]*)[\s\\]+import\b\s*"
    rb"(\*|\((?:[^)#]+|#[^\n]*)*+\)?|[^\n]*(?:\\\r?\n[^\n]*)*)"
)
_ASSIGNED = re.compile(rb"=[\s(\\]*(?:\w+\s*\.\s*)*(\w+)\b(?!\s*[.(])")
"""`x = base`, `x = package.base`: what follows is written as `x.last`."""
_SHELL_CALL = re.compile(rb"\.[ \t\\\r\n]*(?:%b)\b" % "|".join(sorted(SHELL_CALLS)).encode())
_SHELL_LINE = re.compile(rb"(?m)^[ \t]*[!%%]|[=\"'][ \t]*[!%%]|%b" % _SHELL_CALL.pattern)
_GETATTR = re.compile(rb"getattr[\s\\]*\([^\"']{1,300}[\"']+(\w+)")
_PART = rb"#[^\n]*+|\"[^\"\n]*\"|'[^'\n]*'|[^()\"'#]"
_ARGUMENTS = rb"(?:%b|\((?:%b|\((?:%b|\((?:%b)*+\))*+\))*+\))" % ((_PART,) * 4)
"""A character, text or comment among a call's arguments, or a whole call."""
Words = frozenset[bytes]


def may_concern(data: bytes, *, moves: str = "") -> bool:
    """Whether a file may hold a finding. moves: one of `move_table`."""
    if data.lstrip()[:1] == b"{" or b"run_cell_magic" in data:
        # Source inside a string (a notebook's, say) has its newlines in this form.
        data = data.replace(b"\\n", b"\n")
    if moves and _MOVES[moves].search(data):
        return True
    text = data.decode("utf-8", errors="replace")
    return any(rule.may_stand_in(text) for rule in RULES) or may_hold_calls(data, text)


def may_hold_calls(data: bytes, text: str) -> bool:
    """Whether a file may use a row of the table of calls."""
    is_known = any(package in data for package in _HAVE_FORMS)
    if is_known and any(form.search(text) for form in call_table().forms):
        return True
    words = _words(data)
    shell = (name in data for name, parts in _shell_names().items() if parts <= words)
    if any(shell) and _SHELL_LINE.search(data):
        return True
    uses = (use for word in _uses().keys() & words for use in _uses()[word])
    return any(use.words <= words and _may_show(data, words, use) for use in uses)


def _words(data: bytes) -> Words:
    """Every word of a file, as a set that is faster to test than the text."""
    return frozenset(data.translate(_BETWEEN_WORDS).split())


@dataclass(frozen=True)
class _Use:
    """What a file that uses a row has."""

    words: Words
    """All of them: every part of the qualified name stands in an import, a use or a text."""
    name: bytes = b""
    """Qualified; empty where the words are all that is known."""
    unlike: bytes = b""
    """What shows, behind a function's name, that this is another call: a regular expression."""


def _may_show(data: bytes, words: Words, use: _Use) -> bool:
    """Whether a file may use a name, whatever it calls the module that has it."""
    module, _, last = use.name.rpartition(b".")
    if not use.name or (b"getattr" in words and last in _GETATTR.findall(data)):
        return True
    if not module:
        return _compiled(rb"(?m)^[ \t]*(?:import|from)[^\n]*\b%b\b" % last).search(data) is not None
    assigned = _ASSIGNED.findall(data)
    bare = rb"(?<![.\w])%b\b(?:\s+as\b|(?=\s*\()(?!%b))" % (last, use.unlike)
    for source, names in _IMPORTED.findall(data):
        is_there = source == module and last in _words(names)
        if is_there and (not use.unlike or last in assigned or _compiled(bare).search(data)):
            return True
        if names == b"*" and use.name.startswith(source + b"."):
            return True
    parent = module.rpartition(b".")[2]
    bases = {parent, *_compiled(rb"\b%b\s+as\s+(\w+)" % parent).findall(data)}
    chain = rb"\b(?:%b)%b\.%b%b\b" % (b"|".join(sorted(bases)), _GAP, _GAP, last)
    unlike = rb"(?!%b)" % use.unlike if use.unlike else b""
    return not bases.isdisjoint(assigned) or _compiled(chain + unlike).search(data) is not None


@cache
def _shell_names() -> dict[bytes, Words]:
    names = (name.encode() for row in old_calls() if row.kind == "shell" for name in row.names)
    return {name: _words(name) for name in names}


@cache
def _uses() -> dict[bytes, list[_Use]]:
    """The longest word of a use -> the uses, one of which a file with a finding has."""
    found: dict[bytes, list[_Use]] = {}
    for use in dict.fromkeys(_needed()):
        found.setdefault(max(use.words, key=len), []).append(use)
    return found


def _needed() -> Iterator[_Use]:
    for row in old_calls():
        for name in row.names if row.kind not in ("shell", "form") else ():
            words = _words(name.encode())
            shown = b"" if "(" in name or row.kind == "environment" else name.encode()
            is_by_keyword = row.keywords and row.position is None
            unlike = rb"\s*\." if row.kind == "call" else b""
            if row.lacks and not row.unless:
                given = (b"," if row.position == 1 else b"", *map(str.encode, row.lacks))
                unlike = rb"\s*\(%b*?(?:%b\b(?:%b)\b)" % (
                    _ARGUMENTS,
                    given[0] and b",|",
                    b"|".join(given[1:]),
                )
            for keyword in row.keywords if is_by_keyword else ("",):
                yield _Use(words | _words(keyword.encode()), shown, unlike)
