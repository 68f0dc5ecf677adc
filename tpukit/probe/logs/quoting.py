"""Separates errors from text that quotes them: prose, source code, grep output, commit lists."""

import re

from tpukit.knowledge.error_table import line_forms, line_words
from tpukit.probe.logs.log_text import Line

LINES = {name: re.compile(form) for name, form in line_forms()["lines"].items()}
"""Expressions for lines, by name; line_forms.toml says what each finds."""
_DOCUMENT = re.compile(r"[^\s:]+\.(?:md|rst|ipynb|toml|ya?ml):\d+:")
_REPORTED = re.compile(r"\s*(?:(?:[\w.]+\.)?\w*(?:Error|Exception|Warning|Exit)\b|error\b|fatal\b)")
_CODE = re.compile(rf"(?:[+>-]\s*)?(?:{line_words('code')})")
_PROSE = re.compile(rf"(?i)(?<![\w/\\.-])(?:{line_words('prose')})\b")
_TABLE = re.compile(
    r"(?:\b\w*(?:Error|Exception|Timeout|OOM)\w*['\"]?\s?[=:(|]\s?\d+\b.{0,20}?){2,}"
)
"""Several names of errors with numbers: a table of what was counted."""
_WORDS_BEFORE = 3


def is_quoted(line: Line, start: int) -> bool:
    """Whether the text at `start` of a line is a quotation and not an error of this log."""
    text = line.text
    if line.level in ("E", "F") or LINES["exception"].match(text) or text.startswith("File "):
        return False
    if line.level == "I" and _TABLE.search(text):
        return True
    before = text[:start]
    if start > 0 and (_CODE.match(text) or (not line.level and LINES["item"].match(text))):
        return True
    in_code = LINES["commit"].match(text) or _is_source(text, start)
    if in_code or (_is_open(before) and not LINES["value"].search(before)):
        return True
    words = re.findall(r"\b[A-Za-z][a-z]+\b", before)
    is_prose = len(words) >= _WORDS_BEFORE and _PROSE.search(before)
    return not line.level and bool(is_prose or LINES["sentence"].search(text))


def _is_source(text: str, start: int) -> bool:
    """Whether a line is a place in a file and what stands there, as grep prints it."""
    if _DOCUMENT.match(text):
        return True
    place = LINES["source_file"].match(text)
    return place is not None and start >= place.end() and not _REPORTED.match(text, place.end())


def _is_open(before: str) -> bool:
    """Whether a quotation mark before this place is not closed yet."""
    if before.count('"') % 2 or before.count("`") % 2 or before.count("“") > before.count("”"):
        return True
    return bool(re.search(r"(?:^|[\s(])'[^']*$", before))
