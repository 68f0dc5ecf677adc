"""Rules out files by their words, which takes less time than parsing them."""

import re
from functools import cache

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
_HAVE_FORMS = (b"torch", b"transformers")
_SHELL_CALL = re.compile(rb"\.[ \t\\\r\n]*(?:%b)\b" % "|".join(sorted(SHELL_CALLS)).encode())
_SHELL_LINE = re.compile(rb"(?m)^[ \t]*[!%%]|[=\"'][ \t]*[!%%]|%b" % _SHELL_CALL.pattern)
_RANKS = re.compile(rb"(?m)if [^\n]*(?:rank\S* *== *0|is_ma(?:in|ster)|not \w*rank)[^\n]*:\s*$")
_WRAPPERS = (b"DistributedDataParallel", b"FullyShardedDataParallel")
_ALONE = re.compile(rb"torch\.save\(|\bif [^\n]*(?:(?:rank|gpu)\S* *== *0|is_ma|patience|early)")
_MEETS = re.compile(rb"\.(?:barrier|all_reduce|all_gather\w*|broadcast\w*|reduce|gather)\(")
Words = frozenset[bytes]


def may_concern(data: bytes, *, moves: str = "") -> bool:
    """Whether a file may contain a finding: most files need not be parsed.

    moves: one of `move_table`.
    """
    if data.lstrip()[:1] == b"{" or b"run_cell_magic" in data:
        # Source inside a string (a notebook's, say) has its newlines in this form.
        data = data.replace(b"\\n", b"\n")
    if moves and _MOVES[moves].search(data):
        return True
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
    return any(used <= words and imports(data, package) for package, used in _uses())


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
    may = any(word in data and re.search(beside, data) for word, beside in signs)
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


@cache
def _shell_names() -> dict[bytes, Words]:
    names = (name.encode() for row in old_calls() if row.kind == "shell" for name in row.names)
    return {name: _words(name) for name in names}


@cache
def _uses() -> frozenset[tuple[bytes, Words]]:
    """The package (empty for variables, which need no import) and the words of each use of a row:
    all parts of the name stand in an import, a use or a text."""
    found = set()
    for row in old_calls():
        # An argument by position has no keyword.
        keywords = row.keywords if row.position is None else ()
        for name in row.names if row.kind not in ("shell", "form") else ():
            package = b"" if row.kind == "environment" else name.partition(".")[0].encode()
            for keyword in keywords or ("",):
                found.add((package, _words(f"{name} {keyword}".encode())))
    return frozenset(found)
