"""Separates errors from text that quotes them: prose, source code, grep output, commit lists."""

import re

from tpukit.probe.logs.log_text import Line

_SOURCE_FILE = re.compile(
    r"[\w./~+-]*\.(?:pyi?|md|rst|txt|ipynb|toml|ya?ml|json|sh)(?:(?::|-)\d+)?[:-](?!\d| \S)"
)
"""Place in a file as grep prints it; logs and compilers put one space after the place."""
_DOCUMENT = re.compile(r"[^\s:]+\.(?:md|rst|ipynb|toml|ya?ml):\d+:")
_REPORTED = re.compile(r"\s*(?:(?:[\w.]+\.)?\w*(?:Error|Exception|Warning|Exit)\b|error\b|fatal\b)")
_COMMIT = re.compile(
    r"(?:[*|\\/ ]*(?:commit )?(?=\d*[a-f])(?=[a-f]*\d)[0-9a-f]{7,40}\b(?: \(|\s+\S)"
    r"|diff --git |@@ )"
)
_CODE = re.compile(
    r"(?:[+>-]\s*)?(?:raise\s+\w|assert\s|return\s|if\s.*:|elif\s.*:|except\s|with\s.*:|def\s\w"
    r"|print\(|logger\.|logging\.|warnings\.warn|msg\s*=|message\s*=|throw\s|TORCH_CHECK|std::\w+\("
    r"|echo\s|grep\s|pytest\.raises|match=|regex|#{1,6}\s)"
)
_PROSE = re.compile(
    r"(?<![\w/.-])(?:when(?:ever)?|if you|you (?:may|might|will|can|could|see|get)|users?"
    r"|some(?:body|one)|should|avoid(?:s|ing)?|fix(?:e[sd])?|closes|instead of|such as"
    r"|for example|e\.g\.|says?|the (?:message|error|text|log)|names|means|known as"
    r"|troubleshooting|faq|changelog|to-?do|workaround|used to|no longer|handles?|catch(?:es)?"
    r"|tests?|notes?|we|our|they|yesterday|last (?:week|night|month|year))\b",
    re.IGNORECASE,
)
_SENTENCE = re.compile(
    r"\b(?:errors?|exceptions?) (?:is|are|can|happens?|occurs?|appears?)\b|\bis (?:a|the) message\b"
)
_ITEM = re.compile(
    r"[-*+•] (?!-)|\d{1,2}\. |(?:fix|avoid|handle|catch|retry|add|work around|prevent|explain|say"
    r"|document|test|report|raise|ignore|silence|support|revert|improve|detect|merge|update|remove"
    r"|don't|do not|never|no more|mention|describe)(?:e?[sd]|es)?\b(?!.*:\s)",
    re.IGNORECASE,
)
"""Beginning of a list item or of a commit's subject."""
_EXCEPTION = re.compile(
    r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Enabled|Failure)\b\s*(?::|$)"
)
_VALUE = re.compile(
    r"[:=]\s*[\"'`](?:[\w.]+: )?$|(?:^|[Ff]ailure (?:\d+ )?)'$|(?:Error|Exception)\([\"']$"
)
"""Beginning of a JSON field's text (`"error": "`), of an exception's repr, or of what NCCL quotes:
`Cuda failure '`."""
_WORDS_BEFORE = 3


def is_quoted(line: Line, start: int) -> bool:
    """Whether the text at `start` of a line is a quotation and not an error of this log."""
    text = line.text
    if line.level in ("E", "F") or _EXCEPTION.match(text) or text.startswith("File "):
        return False
    before = text[:start]
    if not line.level and start > 0 and _ITEM.match(text):
        return True
    in_code = _COMMIT.match(text) or _is_source(text, start) or (start > 0 and _CODE.match(text))
    if in_code or (_is_open(before) and not _VALUE.search(before)):
        return True
    words = re.findall(r"\b[A-Za-z][a-z]+\b", before)
    is_prose = len(words) >= _WORDS_BEFORE and _PROSE.search(before)
    return not line.level and bool(is_prose or _SENTENCE.search(text))


def _is_source(text: str, start: int) -> bool:
    """Whether a line is a place in a file and what stands there, as grep prints it."""
    if _DOCUMENT.match(text):
        return True
    place = _SOURCE_FILE.match(text)
    return place is not None and start >= place.end() and not _REPORTED.match(text, place.end())


def _is_open(before: str) -> bool:
    """Whether a quotation mark before this place is not closed yet."""
    if before.count('"') % 2 or before.count("`") % 2:
        return True
    if before.count("“") > before.count("”"):
        return True
    return bool(re.search(r"(?:^|[\s(])'[^']*$", before))
