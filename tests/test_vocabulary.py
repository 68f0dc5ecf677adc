"""The project speaks the field's words: no banned term in help texts, messages, docs or tables."""

import ast
import io
import re
import tokenize
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent

BANNED = {
    r"the processor": "the CPU",
    r"live within": "a memory limit",
    r"draws? among": "the number of samples",
    r"(?<!there )is no (?!longer|more)\w+": "invalid ..., or: is not a ...",
    r"mend(?:s|ed|ing)?": "fix",
    r"bites?|biting": "is harmful, or: breaks ...",
    r"hurt(?:s|ing|ful)?": "is slow (or wrong) on TPU",
    r"on the spot": "generated, synthetic",
    r"rehears(?:al|als|e|es|ed|ing)": "emulation on CPU (virtual devices)",
    r"answerers?": "evaluator",
    r"gauges?|gauged": "memory meter, memory usage",
    r"figures": "metrics, statistics, sizes",
    r"rows at once": "batch size",
    r"micro[- _]?steps?": "micro-batch",
    r"so many": "the number, or: up to N",
    r"made[- ]up": "synthetic",
    r"guilty": "failed rank",
    r"last words": "stderr tail",
    r"perceptrons?": "MLP",
    r"(?<!-)gone": "removed, or: has ended",
    r"the average|average weights|averaged (?:weights|model)": "EMA weights",
    r"usual": "default",
    r"traced backend": "a backend with lazy tensors",
    r"process index|processes' index": "rank",
    r"loading processes": "DataLoader workers",
    r"slots and columns": "rows and positions of the KV cache",
    r"tells|told|telling": "log, print, report, say",
}
"""Regular expression -> what to say instead. Matched as whole words, in any case."""

IDENTIFIERS = {
    r"answerers?": "evaluator",
    r"bites?": "applies_to",
    "figures": "metrics",
    r"gauges?": "meter",
    "guilty": "failed_rank",
    r"mends?": "fix",
    r"perceptrons?": "mlp",
    r"rehearsals?": "emulated",
    r"tells?|told": "log",
    "usual": "default",
}
"""Regular expression for a word in the name of a function, class, parameter or variable -> the
field's word."""

FOREIGN_KEYS = {"match", "regex", "hints", "needs"}
"""Fields of the tables that quote other programs."""

DATA_FILES = {"tpukit/tasks/llm/data/dialogue_parts.toml"}
"""Everyday English as data."""

SUBJECTLESS = re.compile(r"(?:Of|Times|Where|Beyond|Below|Less of)\b")
"""Beginning of a docstring of a constant or a field that names neither quantity nor unit."""

_PATTERN = re.compile(
    "|".join(f"(?P<w{i}>\\b(?:{word})\\b)" for i, word in enumerate(BANNED)), re.IGNORECASE
)
_REPLACEMENTS = list(BANNED.values())


def banned_terms(text: str) -> list[str]:
    """Each banned term in a text, and what to say instead; line breaks count as spaces."""
    return [
        f"{match.group()!r} (say: {_REPLACEMENTS[int((match.lastgroup or 'w0')[1:])]})"
        for match in _PATTERN.finditer(" ".join(text.split()))
    ]


def complaints(texts: Iterator[tuple[str, str]]) -> list[str]:
    return [f"{place}: {term}" for place, text in texts for term in banned_terms(text)]


# -- where texts are ---------------------------------------------------------------------------
def files(*patterns: str) -> list[Path]:
    found = [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]
    return [path for path in found if str(path.relative_to(ROOT)) not in DATA_FILES]


def python_texts(path: Path) -> Iterator[tuple[str, str]]:
    """(place, text) of each string literal, docstring and comment of a module."""
    where, source = path.relative_to(ROOT), path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield f"{where}:{node.lineno}", node.value
    comments: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            text = token.string.lstrip("# ")
            if comments and token.start[0] == comments[-1][0] + comments[-1][1].count("\n") + 1:
                comments[-1] = (comments[-1][0], f"{comments[-1][1]}\n{text}")
            else:
                comments.append((token.start[0], text))
    yield from ((f"{where}:{line}", text) for line, text in comments)


def identifiers(path: Path) -> Iterator[tuple[str, str]]:
    """(place, name) of what a module defines: functions, classes, parameters, variables."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.attr
        else:
            continue
        yield f"{path.relative_to(ROOT)}:{node.lineno}", name


def constant_docs(source: str) -> Iterator[tuple[int, str]]:
    """(line, docstring) of each constant, field and attribute."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for before, after in pairwise(body if isinstance(body, list) else []):
            match before, after:
                case ast.Assign() | ast.AnnAssign(), ast.Expr(value=ast.Constant(value=str(text))):
                    yield after.lineno, text


def banned_words(name: str) -> list[str]:
    """Each banned word of a snake_case or CamelCase name, and what to say instead."""
    return [
        f"{word} (say: {right})"
        for word in re.findall(r"[A-Z]?[a-z]+", name)
        for wrong, right in IDENTIFIERS.items()
        if re.fullmatch(wrong, word.lower())
    ]


def markdown_texts(path: Path) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        yield f"{path.relative_to(ROOT)}:{number}", line


def table_texts(path: Path) -> Iterator[tuple[str, str]]:
    where, source = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
    yield from ((where, text) for text in _values(tomllib.loads(source)))
    for number, line in enumerate(source.splitlines(), start=1):
        if line.startswith("#"):
            yield f"{where}:{number}", line


def _values(value: Any, key: str = "") -> Iterator[str]:
    if isinstance(value, str) and key not in FOREIGN_KEYS:
        yield value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _values(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from _values(inner, key)


# -- tests -------------------------------------------------------------------------------------
def test_strings_docstrings_and_comments():
    found = complaints(text for path in files("tpukit/**/*.py") for text in python_texts(path))
    assert not found, "\n".join(found)


def test_identifiers():
    named = (name for path in files("tpukit/**/*.py") for name in identifiers(path))
    found = [f"{place}: {word}" for place, name in named for word in banned_words(name)]
    assert not found, "\n".join(found)


def test_pages():
    pages = files("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs/*.md")
    assert pages
    found = complaints(text for path in pages for text in markdown_texts(path))
    assert not found, "\n".join(found)


def test_docstrings_of_constants_begin_with_a_noun():
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text[:60]}"
        for path in files("tpukit/**/*.py")
        for line, text in constant_docs(path.read_text(encoding="utf-8"))
        if SUBJECTLESS.match(text)
    ]
    assert not found, "\n".join(found)


def test_tables():
    tables = files("tpukit/**/*.toml")
    assert len(tables) >= 8
    found = complaints(text for path in tables for text in table_texts(path))
    assert not found, "\n".join(found)


def test_banned_words_are_found():
    """The checks above can fail."""
    for text in ("a value that bites", "x is no TOML", "memory to\n    live within"):
        assert len(banned_terms(text)) == 1
    for text in ("there is no such file", "it is no longer needed", "unusual"):
        assert banned_terms(text) == []
    assert len(banned_words("_tell_figures")) == 2 and banned_words("telltale") == []
    assert [*constant_docs('A = 1\n"""Of one."""\n')] == [(2, "Of one.")]
