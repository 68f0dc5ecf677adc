"""Reads the place where an exception was raised: source files, packages and values of this machine.

It stands beside the tables, not in their place. The order of trust:

1. A name or an argument that is missing: what the installed packages have (`lost`).
2. A text of the tables; what the place shows stands below it. It is `certain` only where the file
   that raised it is the one that the entry cites: a text can be printed for other reasons, too.
3. Where the tables know the family alone: the values (`values`), then the condition of the `raise`.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Sequence
from dataclasses import replace

from tpukit.probe.logs.explanations import Confidence, Explanation
from tpukit.probe.logs.place.installed import Installed, installed_for
from tpukit.probe.logs.place.live import Uncaught, with_values
from tpukit.probe.logs.place.lost import Advice, lost, refusing
from tpukit.probe.logs.place.raise_site import raise_site
from tpukit.probe.logs.place.values import values
from tpukit.probe.logs.tracebacks import Raised

FAMILIES = (
    "unknown-", "words-", "name-not-", "attribute-not-", "submodule-not-", "keyword-not-",
    "key-missing", "file-not-found", "assertion-",
)  # fmt: skip
"""Beginnings of the ids of entries that know an exception's family alone."""
SITE = "raise-site"
_PIN = re.compile(r"pip install '?([\w-]+)((?:[<>=!~]=?[\d.]+,?)+)'?")
_MOST_FRAMES = 6


def at_the_place(explanation: Explanation, records: Sequence[Uncaught] = ()) -> Explanation:
    """The explanation with what its place shows; as it is where that is another machine's."""
    if explanation.raised is None:
        return explanation
    try:
        return _read(explanation, explanation.raised, records)
    except (OSError, ValueError, RecursionError):
        # Whatever a log names as a file, the tables' answer remains.
        return explanation


def _read(explanation: Explanation, raised: Raised, records: Sequence[Uncaught]) -> Explanation:
    raised, path = with_values(raised, records)
    if not (path or is_here(raised)):
        return explanation
    installed = installed_for(raised, path)
    explanation = replace(explanation, warned=_refused(explanation.fix, installed))
    is_family = explanation.id.startswith(FAMILIES)
    missing, found = lost(raised, installed), values(raised)
    if missing is not None and missing.is_weak and not is_family:
        missing = None
    leading = missing or (found if found and found.leads and is_family else None)
    if leading is not None:
        return replace(
            explanation, place=leading.why, place_fix=leading.fix, leads=True, confidence="probable"
        )
    return _with_site(explanation, raised, is_family, found)


def _with_site(
    explanation: Explanation, raised: Raised, is_family: bool, found: Advice | None
) -> Explanation:
    site = raise_site(raised)
    if site is not None and is_family:
        entry = replace(explanation.entry, id=SITE, source="")
        return replace(
            explanation, entry=entry, place=site.why, place_fix=site.fix, leads=True,
            confidence="probable",
        )  # fmt: skip
    if site is not None:
        is_cited = site.frame.path.endswith(explanation.entry.source.rpartition("/")[2] or "\0")
        sure = explanation.confidence if is_cited else _less_sure(explanation)
        return replace(
            explanation, place=site.why, place_fix="" if is_cited else site.fix, confidence=sure
        )
    return replace(explanation, place=found.why) if found is not None else explanation


def _less_sure(explanation: Explanation) -> Confidence:
    return "probable" if explanation.confidence == "certain" else explanation.confidence


def is_here(raised: Raised) -> bool:
    """Whether a line of the traceback is in a file of this machine, word for word."""
    return any(
        frame.code and linecache.getline(frame.path, frame.line).strip()[:200] == frame.code
        for frame in raised.frames[: -_MOST_FRAMES - 1 : -1]
    )


def _refused(fix: str, installed: Installed) -> str:
    """A sentence on a release in the advice that something installed does not take."""
    for library, pin in _PIN.findall(fix):
        if why := refusing(installed, library, pin):
            return f"`{library}{pin}` does not fit here: {why}."
    return ""
