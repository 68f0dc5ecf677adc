"""Rules out files by their words, which takes far less time than parsing them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property, partial

from tpukit.knowledge.calls import call_table, old_calls, rule_data
from tpukit.probe.lint.shell_lines import SHELL_CALLS

_WORD = frozenset(bytes([byte]) for byte in range(128) if chr(byte).isalnum()) | {b"_"}
_BETWEEN_WORDS = bytes(
    byte if byte > 127 or bytes([byte]) in _WORD else ord(" ") for byte in range(256)
)
_MOVES = {
    "torch_tpu": re.compile(rb"[\"']xla\b|\b(?:PJRT_DEVICE|XLA_[A-Z]|PT_XLA_)"),
    "tpu": re.compile(rb"\b(?:import|from) (?:torch|triton|flash_attn|bitsandbytes|apex)\b"),
}
_PART = rb"#[^\n]*+|\"[^\"\n]*\"|'[^'\n]*'|[^()\"'#]"
_ARGUMENTS = rb"(?:%b|\((?:%b|\((?:%b|\((?:%b)*+\))*+\))*+\))" % ((_PART,) * 4)
"""A character, text or comment among a call's arguments, or a whole call."""
_HAVE_FORMS = (b"torch", b"transformers")
_GAP = rb"(?:[\s\\)]|#[^\n]*\n)*"
"""What may stand around the dot of `a.b` and `(a).b`."""
_CHAIN = b"%%b%b\\.%b%%b\\b(?!%%b)" % (_GAP, _GAP)
_RENAMED = rb"%b\s+as\s+(\w+)"
_compiled = cache(re.compile)
_IMPORTED = re.compile(
    rb"from\s+(\w[\w.]*)[\s\\]+import\b\s*"
    rb"(\*|\((?:[^)#]+|#[^\n]*)*+\)?|[^\n]*(?:\\\r?\n[^\n]*)*)"
)
_ASSIGNED = re.compile(rb"=[\s(\\]*(?:\w+\s*\.\s*)*(\w+)\b(?!\s*[.(])")
"""`x = base`, `x = package.base`: what follows is written as `x.last`."""
_GETATTR = re.compile(rb"getattr[\s\\]*\([^\"']{1,300}[\"']+(\w+)")
_SHELL_CALL = re.compile(rb"\.[ \t\\\r\n]*(?:%b)\b" % "|".join(sorted(SHELL_CALLS)).encode())
_SHELL_LINE = re.compile(rb"(?m)^[ \t]*[!%%]|[=\"'][ \t]*[!%%]|%b" % _SHELL_CALL.pattern)
_TEXTS = re.compile(
    rb"#[^\n]*"
    rb'|"""(?<![fF]""")(?<![fF][rR]""")(?:[^"\\]+|\\.|"(?!""))*+"""'
    rb"|'''(?<![fF]''')(?<![fF][rR]''')(?:[^'\\]+|\\.|'(?!''))*+'''"
    rb'|("""(?:[^"\\]+|\\.|"(?!""))*+(?:""")?|"(?:[^"\\\n]+|\\.)*+"?'
    rb"|'''(?:[^'\\]+|\\.|'(?!''))*+(?:''')?|'(?:[^'\\\n]+|\\.)*+'?)",
    re.DOTALL,
)
"""Comments and long texts without values in them; any other text is its group."""
_RANKS = re.compile(rb"(?m)if [^\n]*(?:rank\S* *== *0|is_ma(?:in|ster)|not \w*rank)[^\n]*:\s*$")
_WRAPPERS = (b"DistributedDataParallel", b"FullyShardedDataParallel")
_ALONE = re.compile(rb"torch\.save\(|\bif [^\n]*(?:(?:rank|gpu)\S* *== *0|is_ma|patience|early)")
_MEETS = re.compile(rb"\.(?:barrier|all_reduce|all_gather\w*|broadcast\w*|reduce|gather)\(")
Words = frozenset[bytes]


def may_concern(data: bytes, *, moves: str = "") -> bool:
    """Whether a file may contain a finding: most files need not be parsed.

    moves: one of `move_table`.
    """
    holds_source = data.lstrip()[:1] == b"{" or b"run_cell_magic" in data
    if holds_source:
        # Source inside a string (a notebook's, say) has its newlines in this form.
        data = data.replace(b"\\n", b"\n")
    if moves and _MOVES[moves].search(data):
        return True
    if not _may_hold_any(data):
        return False
    whole = holds_source or _SHELL_CALL.search(data)
    return bool(whole) or _may_hold_any(_TEXTS.sub(rb"\1", data))


def _may_hold_any(data: bytes) -> bool:
    return may_hold_habits(data) or may_hold_mistakes(data) or may_hold_calls(data)


def may_hold_calls(data: bytes) -> bool:
    """Whether a file may use a row of the table of calls."""
    words = _words(data)
    if any(imports(data, package) for package in _HAVE_FORMS):
        text = data.decode("utf-8", errors="replace")
        if any(form.search(text) for form in call_table().forms):
            return True
    shell = (name in data for name, parts in _shell_names().items() if parts <= words)
    if any(shell) and _SHELL_LINE.search(data):
        return True
    shown = _Shown(data, words)
    is_python = data.lstrip()[:1] != b"{"  # what a notebook's cells print guards nothing
    return any(
        use.words <= words
        and shown.may_show(use)
        and imports(data, use.package)
        and not (is_python and any(_compiled(guard).search(data) for guard in use.guards))
        for word in _uses().keys() & words
        for use in _uses()[word]
    )


def may_hold_habits(data: bytes) -> bool:
    """Whether a file may contain a habit: it uses torch_xla, or an Accelerator."""
    if imports(data, b"torch_xla"):
        return True
    if any(wrapper in data for wrapper in _WRAPPERS) and _ALONE.search(data):
        return True
    if b"torch.distributed" in data and _RANKS.search(data) and _MEETS.search(data):
        return True
    return b"Accelerator" in data and imports(data, b"accelerate")


def may_hold_mistakes(data: bytes) -> bool:
    """Whether a file may contain a mistake of training code."""
    signs = ((word.encode(), beside.encode()) for word, beside in rule_data("signs").items())
    may = any(word in data and _compiled(beside).search(data) for word, beside in signs)
    return may and imports(data, b"torch")


def imports(data: bytes, package: bytes) -> bool:
    """Whether a package stands behind an `import` or `from` on any line; none always does."""
    if not package:
        return True
    at = data.find(package)
    while at >= 0:
        end = at + len(package)
        if data[end : end + 1] not in _WORD:
            start = data.rfind(b"\n", 0, at) + 1
            line = data[start:at]
            # `from a import package` imports a name of a; a continuation line may be an import's.
            is_imported = b"import" in line and (b"from" not in line or b";" in line)
            goes_on = data[start - 2 : start] == b"\\\n"
            if is_imported or goes_on or line.endswith((b"from ", b"from\t")):
                return True
        at = data.find(package, end)
    return False


def _words(data: bytes) -> Words:
    """Every word of a file, as a set that is faster to test than the text."""
    return frozenset(data.translate(_BETWEEN_WORDS).split())


@dataclass(frozen=True)
class _Use:
    """What a file that uses a row has."""

    package: bytes
    """Empty where it needs no import (variables)."""
    words: Words
    """All of them: every part of the qualified name stands in an import, a use or a text."""
    name: bytes = b""
    """Qualified; empty where the words are all that is known."""
    is_call: bool = False
    unlike: bytes = b"(?!)"
    """What shows, behind its name, that this is another call: a regular expression."""
    guards: tuple[bytes, ...] = ()
    """Regular expressions of files that use it rightly."""


class _Shown:
    """Whether one file may use a name, whatever the file calls the module that has it."""

    def __init__(self, data: bytes, words: Words) -> None:
        self._data = data
        self._words = words

    def may_show(self, use: _Use) -> bool:
        name = use.name
        if not name:
            return True
        module, _, last = name.rpartition(b".")
        imported = [n for source, n in self._imports if source == module and last in _words(n)]
        if imported and (
            not use.is_call
            or last in self._assigned
            or _compiled(_RENAMED % last).search(self._data)
            or _compiled(rb"(?<![.\w])%b(?=\s*\()(?!%b)" % (last, use.unlike)).search(self._data)
        ):
            return True
        if any(name.startswith(source + b".") for source, names in self._imports if names == b"*"):
            return True
        if not self._texts.isdisjoint(name.split(b".")):
            return True
        parent = module.rpartition(b".")[2]
        bases = {parent, *_compiled(_RENAMED % parent).findall(self._data)}
        return not self._assigned.isdisjoint(bases) or any(
            _compiled(_CHAIN % (base, last, use.unlike)).search(self._data) for base in bases
        )

    @cached_property
    def _imports(self) -> list[tuple[bytes, bytes]]:
        """(module, names) of `from module import names`."""
        return _IMPORTED.findall(self._data)

    @cached_property
    def _assigned(self) -> Words:
        return frozenset(_ASSIGNED.findall(self._data))

    @cached_property
    def _texts(self) -> Words:
        """Attributes by `getattr`."""
        return frozenset(_GETATTR.findall(self._data) if b"getattr" in self._words else ())


@cache
def _shell_names() -> dict[bytes, Words]:
    names = (name.encode() for row in old_calls() if row.kind == "shell" for name in row.names)
    return {name: _words(name) for name in names}


@cache
def _uses() -> dict[bytes, list[_Use]]:
    """The longest word of a use -> the uses, one of which a file with a finding has."""
    found: dict[bytes, list[_Use]] = {}
    for use in dict.fromkeys(_needed()):
        found.setdefault(max(use.words - {use.package} or use.words, key=len), []).append(use)
    return found


def _needed() -> Iterator[_Use]:
    variables = call_table().environment
    for row in old_calls():
        for name in row.names:
            words = _words(name.encode())
            package, _, _ = name.partition(".")
            if package in variables:
                yield _Use(b"", words)
            elif row.kind not in ("shell", "form"):
                shown = b"" if "(" in name or "." not in name else name.encode()
                guards = tuple(map(str.encode, row.unless.get("file", ())))
                is_call = row.kind == "call"
                use = partial(_Use, package.encode(), name=shown, is_call=is_call, guards=guards)
                for keyword in map(str.encode, row.keywords):
                    unlike = rb"\s*\((?:(?!\b%b\b|\*\*)%b)*\)" % (keyword, _ARGUMENTS)
                    yield use(words | {keyword}, unlike=unlike)
                # An argument by position has no keyword.
                if not row.keywords or row.position is not None:
                    lacks = b",|" if row.position == 1 else b"", "|".join(row.lacks).encode()
                    given = rb"\s*\(%b*?(?:%b\b(?:%b)\b)" % (_ARGUMENTS, *lacks)
                    unlike = given if row.lacks and not row.unless else rb"\s*\."
                    yield use(words, unlike=unlike if row.kind == "call" else rb"(?!)")
