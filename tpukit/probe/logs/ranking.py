"""Orders what a log shows: what ended the run first; what it survived comes later."""

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from tpukit.knowledge.error_table import ROLES, line_words
from tpukit.probe.logs.explanations import Explanation
from tpukit.probe.logs.log_text import Line

_PROGRESS = re.compile(line_words("progress"))
_STEPS_AFTER = 3
_MOST_STEPS = 200_000
_EXCERPT = 5


class StepsSeen:
    """Notes where the run went on: the lines of progress that each rank wrote."""

    def __init__(self) -> None:
        self._lines: dict[str, list[int]] = defaultdict(list)
        self._count = 0

    def feed(self, lines: Iterable[Line]) -> None:
        for line in lines:
            of_rank = self._lines[line.stream]
            self._count += bool(line.text)
            if len(of_rank) < _MOST_STEPS and _PROGRESS.search(line.text[:300]):
                of_rank.append(line.number)

    def is_excerpt(self) -> bool:
        """Whether the log is a few lines, none of them a step: pasted for one message."""
        return self._count <= _EXCERPT and not any(self._lines.values())

    def between(self, line: int, end: float, stream: str) -> bool:
        """Whether the rank made several steps after one line and before another."""
        of_rank = self._lines.get(stream, [])
        return bisect_left(of_rank, end) - bisect_right(of_rank, line) >= _STEPS_AFTER


def ranked(found: Sequence[Explanation], steps: StepsSeen | None = None) -> list[Explanation]:
    """The candidates of a log in order, each with its role:

    1. What the log only warns of, or tries again, ended nothing: a warning.
    2. What the same rank went on after ended nothing either, unless the log has no other cause and
       a cascade follows: then other ranks printed their steps after one had failed.
    3. Without a cause the first symptom is one: a crash, a lost connection.
    4. A text that names the cause only where there is no other yields to one that does.
    5. Causes, consequences, warnings, harmless messages; `_order` sorts those of one role.
    """
    consequences = [e.line for e in found if e.role == "consequence"]
    has_failed = any(e.role in ("cause", "consequence") and not e.mild for e in found)
    found = [_softened(e) if _is_warned_of(e, has_failed) else e for e in found]
    survived = [e for e in found if e.role == "cause" and _is_survived(e, consequences, steps)]
    causes = [e for e in found if e.role == "cause" and e not in survived]
    if causes or not _is_followed(survived, consequences):
        note = "(The run went on after it.)"
        found = [replace(e, role="warning", note=note) if e in survived else e for e in found]
    if not any(e.role == "cause" for e in found):
        found = _with_symptom(found, is_excerpt=steps is not None and steps.is_excerpt())
    if any(not cause.last_resort for cause in causes):
        found = [
            replace(e, role="consequence") if e in causes and e.last_resort else e for e in found
        ]
    return sorted(found, key=_order)


def _is_warned_of(explanation: Explanation, has_failed: bool) -> bool:
    is_report = explanation.role == "consequence" and has_failed
    return explanation.mild and explanation.role in ("cause", "consequence") and not is_report


def _softened(explanation: Explanation) -> Explanation:
    return replace(explanation, role="warning", note="(The log only warns of it.)")


def _with_symptom(found: Sequence[Explanation], *, is_excerpt: bool) -> list[Explanation]:
    """With the first symptom as the cause: a crash, a lost connection, in an excerpt of a few lines
    what it complains of; not a launcher's report of a process."""
    symptoms = [e for e in found if e.role == "consequence" and e.entry.topic != "report"]
    symptoms = symptoms or [e for e in found if is_excerpt and e.entry.topic == "complaint"]
    first = min(symptoms, key=lambda e: e.line, default=None)
    cause = first and replace(first, role="cause", confidence="probable")
    return [cause if e is first and cause else e for e in found]


def _is_survived(
    explanation: Explanation, consequences: Sequence[int], steps: StepsSeen | None
) -> bool:
    """Whether the same rank made several steps after its last line, before anything failed."""
    if steps is None or explanation.entry.topic == "non-finite":
        return False
    last = explanation.last or explanation.line
    end = min((line for line in consequences if line > last), default=float("inf"))
    return steps.between(last, end, explanation.stream)


def _is_followed(survived: Sequence[Explanation], consequences: Sequence[int]) -> bool:
    """Whether a cascade comes after all that the run seems to have survived: other ranks print
    their steps after one has failed."""
    last = max((e.last or e.line for e in survived), default=0)
    return bool(survived) and any(line > last for line in consequences)


def _order(explanation: Explanation) -> tuple[int, bool, bool, int]:
    """Of one role: what a scheduler says of the job's end outranks the lines before it; a line that
    only says error comes last; otherwise the first one in the log led to the others."""
    is_verdict = explanation.entry.topic == "scheduler"
    is_possible = explanation.confidence == "possible"
    return ROLES.index(explanation.role), not is_verdict, is_possible, explanation.line
