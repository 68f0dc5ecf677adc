"""The smallest difference of two texts in lines (Myers 1986), as a unified diff."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

CONTEXT = 3
_MOST_STEPS = 2000
"""Beyond so large a difference the smallest one takes too long."""


@dataclass(frozen=True)
class Change:
    """Lines [first, last) of the old text become [new_first, new_last) of the new one."""

    first: int
    last: int
    new_first: int
    new_last: int


def unified(path: str, old: str, new: str) -> str:
    """The difference as `diff -u` shows it; `patch -p0` takes it."""
    before, after = old.split("\n"), new.split("\n")
    ends = (_end(before), _end(after))
    lines = [f"--- {path}", f"+++ {path}"]
    for group in _groups(_whole(changes(before, after), before, after, ends)):
        lines += _hunk(group, before, after, ends)
    return "\n".join(lines) if len(lines) > 2 else ""


def _end(lines: list[str]) -> bool:
    """Whether a text ends in a newline; takes the empty part behind it away."""
    if lines and lines[-1] == "":
        lines.pop()
        return True
    return False


def _whole(
    found: list[Change], before: list[str], after: list[str], ends: tuple[bool, bool]
) -> list[Change]:
    """The changes; a last line that alone gains or loses its newline is one too."""
    reached = found and found[-1].last == len(before)
    if ends[0] == ends[1] or reached or not before or not after:
        return found
    return [*found, Change(len(before) - 1, len(before), len(after) - 1, len(after))]


def changes(before: Sequence[str], after: Sequence[str]) -> list[Change]:
    """The fewest lines to remove and to add, in order."""
    start, most = 0, min(len(before), len(after))
    while start < most and before[start] == after[start]:
        start += 1
    end = 0
    while end < most - start and before[len(before) - 1 - end] == after[len(after) - 1 - end]:
        end += 1
    old = before[start : len(before) - end]
    new = after[start : len(after) - end]
    return [
        Change(c.first + start, c.last + start, c.new_first + start, c.new_last + start)
        for c in _merged(_script(old, new))
    ]


def _script(old: Sequence[str], new: Sequence[str]) -> list[Change]:
    """Myers' greedy search: `reach[k]` is the furthest line of `old` on diagonal k."""
    if not old or not new:
        return [Change(0, len(old), 0, len(new))] if old or new else []
    reach: dict[int, int] = {1: 0}
    history: list[dict[int, int]] = []
    for steps in range(min(len(old) + len(new), _MOST_STEPS) + 1):
        history.append({k: reach[k] for k in range(-steps - 1, steps + 2) if k in reach})
        for k in range(-steps, steps + 1, 2):
            down = k == -steps or (k != steps and reach[k - 1] < reach[k + 1])
            x = reach[k + 1] if down else reach[k - 1] + 1
            y = x - k
            while x < len(old) and y < len(new) and old[x] == new[y]:
                x, y = x + 1, y + 1
            reach[k] = x
            if x >= len(old) and y >= len(new):
                return _walked_back(history, len(old), len(new))
    matcher = SequenceMatcher(None, old, new, autojunk=False)
    return [Change(*c[1:]) for c in matcher.get_opcodes() if c[0] != "equal"]


def _walked_back(history: list[dict[int, int]], x: int, y: int) -> list[Change]:
    found: list[Change] = []
    for steps in range(len(history) - 1, 0, -1):
        reach, k = history[steps], x - y
        down = k == -steps or (k != steps and reach[k - 1] < reach[k + 1])
        before = k + 1 if down else k - 1
        x = reach[before]
        y = x - before
        found.append(Change(x, x, y, y + 1) if down else Change(x, x + 1, y, y))
    return found[::-1]


def _merged(found: Sequence[Change]) -> list[Change]:
    merged: list[Change] = []
    for change in found:
        last = merged[-1] if merged else None
        if last and last.last == change.first and last.new_last == change.new_first:
            merged[-1] = Change(last.first, change.last, last.new_first, change.new_last)
        else:
            merged.append(change)
    return merged


def _groups(found: Sequence[Change]) -> Iterator[list[Change]]:
    """Changes that are near enough to share a hunk."""
    group: list[Change] = []
    for change in found:
        if group and change.first - group[-1].last > 2 * CONTEXT:
            yield group
            group = []
        group.append(change)
    if group:
        yield group


def _hunk(
    group: Sequence[Change], before: Sequence[str], after: Sequence[str], ends: tuple[bool, bool]
) -> Iterator[str]:
    above = min(CONTEXT, group[0].first)
    first, new_first = group[0].first - above, group[0].new_first - above
    below = min(CONTEXT, len(before) - group[-1].last)
    last, new_last = group[-1].last + below, group[-1].new_last + below
    yield f"@@ -{_range(first, last)} +{_range(new_first, new_last)} @@"
    at = first
    for change in group:
        yield from (f" {line}" for line in before[at : change.first])
        yield from _side("-", before, change.first, change.last, ends[0])
        yield from _side("+", after, change.new_first, change.new_last, ends[1])
        at = change.last
    yield from _side(" ", before, at, last, ends[0])


def _side(mark: str, lines: Sequence[str], first: int, last: int, ends: bool) -> Iterator[str]:
    yield from (f"{mark}{line}" for line in lines[first:last])
    if last == len(lines) and last > first and not ends:
        yield "\\ No newline at end of file"


def _range(first: int, last: int) -> str:
    """Lines as `@@` names them: a single one without its count."""
    count = last - first
    start = first + 1 if count else first
    return f"{start}" if count == 1 else f"{start},{count}"
