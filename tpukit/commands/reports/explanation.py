"""`tpukit doctor --explain`: explains an error log, causes first."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tpukit.commands.output import Output
from tpukit.io.secrets import without_secrets
from tpukit.knowledge.error_table import ROLES, Role, read_known_errors
from tpukit.probe.logs import ExplainedLog, explain_log, open_log
from tpukit.probe.logs.explanations import Explanation, shorten
from tpukit.probe.logs.place.live import Uncaught, given_records

_SHOWN: dict[Role, int] = {"cause": 3, "consequence": 2, "warning": 2, "harmless": 0}
"""Maximum number that is shown in full, so that a report fits on a screen."""
_MOST_NAMED = 6
_WIDTH = 200
_WHY = 500
_DO = 400
"""Characters that are shown of a cause and of its advice: with the heading and the source twelve
lines of a hundred columns. --json has all."""
_SENTENCE = re.compile(r"(?<=[.;]) (?=[A-Z`])")
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def explain_file(name: str, knowledge: Sequence[Path], seconds: float, output: Output) -> int:
    """Prints the explanations of a log, or that it has no known error; the exit code."""
    log = explain_named(name, seconds, knowledge, given_records() if name == "-" else ())
    for line in explanation_lines(log):
        output.text(line)
    output.result({
        "ok": not log.has_error, "hardware": None, "versions": {}, "checks": [], "findings": [],
        **fields_of(log),
    })  # fmt: skip
    return int(log.has_error)


def explain_named(
    name: str, seconds: float, knowledge: Sequence[Path] = (), records: Sequence[Uncaught] = ()
) -> ExplainedLog:
    """The explanations of a log, by the package's table and the user's own files."""
    return explain_log(open_log(name, seconds), read_known_errors(knowledge), records)


def fields_of(log: ExplainedLog) -> dict[str, Any]:
    """The fields of `--json` about a log."""
    return {
        "explanations": [explanation.as_json() for explanation in log.explanations],
        "unknown": [
            {"line": line.number, "text": without_secrets(line.text)} for line in log.unknown
        ],
        "lines": log.lines,
        "notes": log.notes,
    }


def explanation_lines(log: ExplainedLog) -> list[str]:
    """The explanations for people."""
    lines = list(log.notes)
    for role in ROLES:
        same = [e for e in log.explanations if e.role == role]
        for index, explanation in enumerate(same[: _SHOWN[role]]):
            heading = "First cause" if role == "cause" and index == 0 else role.capitalize()
            lines += _explanation(explanation, heading)
        if len(same) > _SHOWN[role]:
            lines.append(_more(same[_SHOWN[role] :], role, shown=_SHOWN[role] > 0))
    if not log.explanations:
        lines.append(f"No known error in these {log.lines} lines.")
        lines += [f"  Possibly an error, line {e.number}: {_cut(e.text)}" for e in log.unknown]
        lines.append("  Add your own entries with --knowledge FILE (see docs/doctor.md).")
    elif log.explanations[0].role == "consequence":
        lines.append(
            "The cause is not in this log: look for the first error in the logs of all ranks."
        )
    return [_CONTROL_CHARACTERS.sub("", line) for line in lines]


def _explanation(explanation: Explanation, heading: str) -> list[str]:
    times = f", {explanation.count} times" if explanation.count > 1 else ""
    where = f"line {explanation.line}{times}, {explanation.id}, {explanation.confidence}"
    reason = explanation.reason.removeprefix(f"`{explanation.text}`. ")
    why = _fitted(_WHY, reason, explanation.place, explanation.note)
    lines = [
        f"{heading} ({where}): {_cut(explanation.text)}",
        f"  why: {why}",
        f"  do:  {_fitted(_DO, explanation.advice, explanation.advice_of_place)}",
    ]
    if explanation.entry.source:
        lines.append(f"  see: {explanation.entry.source}")
    return [*lines, ""]


def _fitted(width: int, *parts: str) -> str:
    """The parts without their last sentences where all are longer than `width` together: the later
    parts, which are about this failure alone, get their half first."""
    fitted: list[str] = []
    for index, part in reversed(list(enumerate(parts))):
        left = width - sum(len(text) + 1 for text in fitted)
        text = _first_sentences(part, left if index == 0 else left // 2)
        fitted.insert(0, text)
    return " ".join(filter(None, fitted))


def _first_sentences(text: str, width: int) -> str:
    kept = ""
    for sentence in _SENTENCE.split(text):
        if len(kept) + len(sentence) > width and len(text) > width:
            break
        kept = f"{kept} {sentence}".strip()
    return re.sub(";$", ".", kept) or shorten(text, width)


def _more(explanations: Sequence[Explanation], role: Role, shown: bool) -> str:
    """One line for the explanations that are not shown."""
    names = ", ".join(f"{e.id} (line {e.line})" for e in explanations[:_MOST_NAMED])
    rest = len(explanations) - _MOST_NAMED
    return (
        f"{role.capitalize()}, {'further' if shown else 'not shown'} ({len(explanations)}): {names}"
        + (f" and {rest} more" if rest > 0 else "")
        + "; --json has all."
    )


def _cut(text: str) -> str:
    return shorten(text, _WIDTH)
