"""What the numbers in an out-of-memory text say about the batch."""

from __future__ import annotations

import re
from collections.abc import Mapping

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_NUMBER = re.compile(r"([\d,.]+?)\.?\s*([KMGT]?)(?:i?B)?$")


def parse_bytes(text: str) -> float | None:
    """`21.84G`, `180.59M` or `17179869184` in bytes; None where it is no such number."""
    match = _NUMBER.match(text.strip())
    if match is None:
        return None
    try:
        return float(match.group(1).replace(",", "")) * _UNITS[match.group(2)]
    except ValueError:
        return None


def verdict(asked: float, limit: float) -> str:
    """One buffer against one chip's memory: "grow", "fine", "near" or "over"."""
    share = asked / limit
    if share < 1 / 4:
        return "grow"
    if share < 1 / 2:
        return "fine"
    return "near" if share <= 1 else "over"


_SAID = {
    "grow": "the batch can grow",
    "fine": "fine",
    "near": "near the limit",
    "over": "over the limit",
}


def advise(captures: Mapping[str, str]) -> str:
    """A sentence on the numbers of an out-of-memory text; empty where it has none."""
    figures = {name: parse_bytes(value) for name, value in captures.items()}
    asked, limit = figures.get("asked_bytes"), figures.get("limit_bytes")
    if asked and limit:
        said = _SAID[verdict(asked, limit)]
        return f"Asked: {_gib(asked)} of {_gib(limit)} a chip: {said}."
    used, capacity = figures.get("used"), figures.get("capacity")
    if used and capacity and used > capacity:
        return f"Scale the batch by about {capacity / used:.2f} ({_gib(capacity)} / {_gib(used)})."
    return ""


def _gib(figure: float) -> str:
    return f"{figure / 2**30:.2f} GiB"
