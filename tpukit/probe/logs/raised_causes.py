"""Explains exceptions that no text of the table knows: by class, message and traceback."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache

from tpukit.knowledge.error_table import KnownError, line_forms, unknown_errors
from tpukit.probe.logs.explanations import Confidence, Explanation, shorten
from tpukit.probe.logs.matching import Matches
from tpukit.probe.logs.particulars import particulars
from tpukit.probe.logs.quoting import LINES, is_quoted
from tpukit.probe.logs.tracebacks import Frame, Raised

REPORTED, UNKNOWN, _AT_IMPORT, _IN_LIBRARY, FAILED_CHECK, *_LISTS = unknown_errors()
_CASCADES, _AFTERMATH, _TRIED = (row.exception for row in _LISTS)
_NATIVE = ("terminate", "failed check")
_ABOUT_A_NAME = re.compile(r"has no attribute|unexpected keyword argument|missing \d+ required")
"""Python's own words before a name that is not there: a rule that matches within the name explains
another exception."""
_REPR = re.compile(
    r"<[\w. ]+ (?:object )?at 0x[0-9a-fA-F]+>|<(?:class|function) [^>]{1,200}>"
    r"|functools\.partial\((?:[^()]|\([^()]*\)){0,200}\)"
)
"""Objects as Python prints them: their words say nothing of the error."""
_OPTIONAL_PART = re.compile(r"\[\[.*?\]\](?!\])")
_OPEN_QUOTE = re.compile(r"(?:^|[\s(\[{])'[^']*$|^[^']*\w'(?=[\s)\]}]|$)")
_DANGLING = re.compile(
    r"\b(?:that|which|the|an?|of|to|for|with|in|on|by|and|or|is|are|was|from|as|than|if|be)$|^[)\]},.;:]"
)
"""The end of a piece that was cut within a sentence."""
_DURING = {words: re.compile(form) for words, form in line_forms()["during"].items()}
_MESSAGE_LINES = 3
_MOST_CAUSES = 3
_OWN_WORDS = 13
"""Characters."""
_VARYING = re.compile(r"(\\\W)|\(\?(?:P<\w+>|<?[:=!]|\w+[:)])|\[(?:\\.|[^\]\\])+\]|\\[A-Za-z]")
_FIXED = re.compile(r"(?:\\\W|[^\\()\[\]{}.*+?|^$\0])+")
_WIDTH = 200


def explain_raised(
    chains: Iterable[Raised],
    entries: Sequence[KnownError],
    matches: Matches,
    releases: Mapping[str, str],
) -> list[Explanation]:
    """The texts that the log shows, with the exceptions that they belong to, then one explanation
    for each exception that ends on no line of such a text. `releases` are those of libraries that
    the log names."""
    rules = sorted((entry for entry in entries if entry.exception), key=_breadth)
    texts, found = dict(matches.by_id), dict[str, Explanation]()
    for raised in sorted(chains, key=lambda raised: not raised.frames):
        of_chain = _texts_of(raised, texts, matches.lines, rules, releases)
        texts |= of_chain
        is_explained = any(e.role in ("cause", "consequence") for e in of_chain.values())
        if is_explained or any(link.line.number in matches.lines for link in raised.chain()):
            continue
        if not _is_own(raised):
            continue
        chosen = _root(raised)
        if chosen is not raised and chosen.users_frame is None:
            chosen = replace(chosen, frames=[*raised.frames, *chosen.frames])
        key = re.sub(r"\d+", "0", chosen.message or chosen.name)
        if key in found:
            last = max(found[key].last, chosen.line.number)
            found[key] = replace(found[key], count=found[key].count + 1, last=last)
        else:
            found[key] = _explanation(chosen, rules, releases)
    return [*(texts[name] for name in matches.own), *list(found.values())[:_MOST_CAUSES]]


def explain_logged(
    logged: Iterable[Raised], entries: Sequence[KnownError], releases: Mapping[str, str]
) -> list[Explanation]:
    """The first exception that a program reports in its own words: without its class, that of a
    rule whose own words stand in the message."""
    rules = sorted((entry for entry in entries if entry.exception), key=_breadth)
    for raised in logged:
        for rule in rules:
            match = _matched(rule, raised) if raised.name else _matched_logged(rule, raised)
            if match is not None:
                return [_answer(raised, rule, match, releases)]
    return []


def _matched_logged(rule: KnownError, raised: Raised) -> dict[str, str] | None:
    """What a rule captures in a message that may have lost its class, or stand behind words of a
    program's own; None where too little of the rule's text is there."""
    if rule.frames or rule.topic == "words":
        return None
    line = raised.line._replace(text=raised.message[:2000])
    for expression in rule.message:
        match = _search(expression, line.text)
        if match is None or not (raised.name or raised.is_logged or not match.start()):
            continue
        is_own = any(part in match[0].lower() for part in _own_words(expression.pattern))
        if is_own and not is_quoted(line, match.start()):
            return {name: value for name, value in match.groupdict().items() if value}
    return None


@cache
def _own_words(pattern: str) -> list[str]:
    """The longer fixed texts of an expression, one of which shows that a message is its own."""
    fixed = _FIXED.findall(_VARYING.sub(lambda match: match[1] or "\0", pattern))
    texts = (re.sub(r"\\(.)", r"\1", part).lower() for part in fixed)
    return [text for text in texts if len(text) >= _OWN_WORDS and " " in text.strip()]


def _texts_of(
    raised: Raised,
    texts: Mapping[str, Explanation],
    lines: Mapping[int, str],
    rules: Sequence[KnownError],
    releases: Mapping[str, str],
) -> dict[str, Explanation]:
    """The texts of the table on the lines of this chain, with the exception that ended on such a
    line: what they take for a warning is then the cause, and an entry `below` them that fits the
    exception explains it better."""
    ends = {link.line.number for link in raised.chain()}
    first = min(link.first_line for link in raised.chain())
    found: dict[str, Explanation] = {}
    for number in range(first, raised.line.number + _MESSAGE_LINES + 1):
        if number not in lines:
            continue
        name = lines[number]
        explanation = found.get(name, texts[name])
        # What stands below an exception's line can be a part of its message.
        is_weak = explanation.role != "cause" or explanation.last_resort
        if number > raised.line.number and is_weak:
            continue
        is_within = first <= explanation.line <= explanation.last <= raised.last_line + 1
        if raised.is_handled and is_within:
            # Without a level it may be all that the log says.
            is_warned_of = raised.line.level in ("W", "I")
            explanation = replace(explanation, mild=is_warned_of, last_resort=not is_warned_of)
        if number in ends and explanation.role != "consequence" and not explanation.shown:
            below = explanation.entry.below
            narrower = (r for r in rules if r.id in below and _matched(r, raised) is not None)
            entry = next(narrower, explanation.entry)
            captures = particulars(raised, explanation.captures, entry, releases)
            sure = explanation.confidence if entry is explanation.entry else "probable"
            explanation = replace(
                explanation, entry=entry, captures=captures, confidence=sure, shown=_place(raised),
                raised=raised,
            )  # fmt: skip
        if number in ends and explanation.role == "warning" and not raised.is_handled:
            explanation = replace(explanation, role="cause", mild=False)
        found[name] = explanation
    return found


def _is_own(raised: Raised) -> bool:
    """Whether this is an exception of its own, not a launcher's report of one."""
    is_report = raised.is_report or (raised.class_name == "Exception" and not raised.message)
    return not is_report and all(link.class_name not in _CASCADES for link in raised.chain())


def _root(raised: Raised) -> Raised:
    """The exception of a chain that names the cause: the first, unless it was expected."""
    chain = raised.chain()
    while len(chain) > 1 and chain[1].while_handling and chain[0].class_name in _TRIED:
        chain = chain[1:]
    return chain[0]


def _explanation(
    raised: Raised, rules: Sequence[KnownError], releases: Mapping[str, str]
) -> Explanation:
    for rule in rules:
        match = _matched(rule, raised)
        if match is None and raised.name == "error":
            match = _matched_logged(rule, raised)
        if match is not None:
            return _answer(raised, rule, match, releases)
    entry = {"error": REPORTED, "compiler error": REPORTED}.get(
        raised.name, FAILED_CHECK if raised.name in _NATIVE else UNKNOWN
    )
    if entry is UNKNOWN and raised.frames and raised.frames[-1].package:
        is_import = any(f.where == "<module>" and f.package for f in raised.frames)
        entry = _AT_IMPORT if is_import else _IN_LIBRARY
    return _answer(raised, entry, {}, releases)


def _answer(
    raised: Raised, entry: KnownError, captures: Mapping[str, str], releases: Mapping[str, str]
) -> Explanation:
    is_guess = entry.topic == "words" and "*" in entry.exception and not captures
    is_sure = (raised.frames and not is_guess) or raised.name in _NATIVE
    confidence: Confidence = "probable" if is_sure else "possible"
    is_mentioned = raised.name == "ImportError" and not raised.has_class
    is_weak = raised.class_name in _AFTERMATH or is_mentioned or raised.is_logged
    return Explanation(
        entry, raised.line.number, shorten(raised.line.text, 300),
        particulars(raised, captures, entry, releases), 1, entry.role,
        confidence, raised.line.stream, raised.line.number, mild=raised.is_handled,
        last_resort=is_weak or entry is REPORTED, shown=_sentence(raised, entry.topic),
        raised=raised, guessed=is_guess,
    )  # fmt: skip


def _breadth(rule: KnownError) -> tuple[bool, bool, bool, bool]:
    """Rules over the traceback come first, then those over the message, then any of a class (also
    where an empty expression is one of its), and last those over single words."""
    is_any = not (rule.message and all(expression.pattern for expression in rule.message))
    return rule.topic == "words", not rule.frames, is_any, "*" in rule.exception


def _matched(rule: KnownError, raised: Raised) -> dict[str, str] | None:
    """What a rule's expression captures in this exception's message; None where it differs."""
    # A check within a library is about its own state, not about what it is given.
    is_other = rule.topic == "words" and raised.name in _NATIVE
    if is_other or not {"*", raised.class_name}.intersection(rule.exception):
        return None
    called = (
        f"{frame.path} in {frame.where}\n{frame.code}".replace("\\", "/") for frame in raised.frames
    )
    if rule.frames and not any(p in text for text in (raised.name, *called) for p in rule.frames):
        return None
    if not rule.message:
        return {}
    text = raised.message[:2000]
    if rule.topic == "words":
        text += f"\n{raised.details}"
    about = None if rule.frames else _ABOUT_A_NAME.search(text)
    if rule.topic == "words":
        text = _REPR.sub(lambda found: "\0" * len(found[0]), text)
    for expression in rule.message:
        match = _search(expression, text)
        if match and not (about and match.start() >= about.end()):
            captured = {name: value for name, value in match.groupdict().items() if value}
            if rule.topic != "words":
                return captured
            sound = {name: value for name, value in captured.items() if is_sound(value)}
            if sound == captured or _can_leave_out(rule, captured.keys() - sound.keys()):
                return sound
    return None


def is_sound(text: str) -> bool:
    """Whether a piece of a message can stand in a sentence: it closes what it opens, and ends."""
    pairs = all(text.count(a) == text.count(b) for a, b in ("()", "[]", "{}"))
    quotes = all(text.count(mark) % 2 == 0 for mark in '"`') and not _OPEN_QUOTE.search(text)
    return pairs and quotes and "\0" not in text and not _DANGLING.search(text)


def _can_leave_out(rule: KnownError, names: Iterable[str]) -> bool:
    """Whether the rule's sentences have another form without these."""
    texts = [_OPTIONAL_PART.sub("", text) for text in (rule.cause, rule.fix)]
    return not any(f"{{{name}}}" in text for name in names for text in texts)


def _search(expression: re.Pattern[str], text: str) -> re.Match[str] | None:
    """A match that does not hang on a folder's, a repository's or an address's name, unless the
    expression itself is about paths."""
    match = expression.search(text)
    if match and not re.search(r"/|-packages|\\\\", expression.pattern):
        return expression.search(LINES["names"].sub(lambda n: "_" * len(n[0]), text)) and match
    return match


def _sentence(raised: Raised, topic: str) -> str:
    """The exception, quoted, and the line of the user's code that led to it."""
    parts = (raised.name if raised.has_class else "", raised.message)
    text = ": ".join(filter(None, parts))
    if topic == "words" and raised.details and len(text) < _WIDTH:
        text = " ".join(f"{text} {raised.details}".split())
    return f"`{shorten(text, _WIDTH)}`. {_place(raised)}".rstrip()


def _place(raised: Raised) -> str:
    """Where the exception comes from, as a sentence; empty without a traceback."""
    rank = f" (rank {raised.line.stream})" if raised.line.stream else ""
    own = raised.users_frame
    frame = own or next(iter(raised.frames[-1:]), None)
    if frame is None:
        return ""
    line = f", line {frame.line}" if frame.line else ""
    code = f": `{shorten(frame.code, 80)}`" if own and frame.code else ""
    during = next((f", while {w}" for f in reversed(raised.frames) for w in _activities(f)), "")
    return f"Raised {'at' if own else 'in a library,'} {frame.path}{line}{rank}{during}{code}."


def _activities(frame: Frame) -> Iterable[str]:
    """What a program does in this function."""
    called = f"{frame.path} in {frame.where}".replace("\\", "/")
    return (words for words, form in _DURING.items() if form.search(called))
