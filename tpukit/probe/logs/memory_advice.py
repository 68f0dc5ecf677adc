"""Advice from the sizes in an out-of-memory text."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tpukit.errors import ConfigError
from tpukit.io.units import format_bytes, parse_bytes


def logged_bytes(text: str) -> int | None:
    """`21.84G`, `180.59M` or `17179869184` in bytes: logs mean 2^30 by G. None for other text."""
    try:
        return parse_bytes(re.sub(r"([KMGT])i?B?\.?$", r"\1iB", text.strip().replace(",", "")))
    except ConfigError:
        return None


def verdict(asked: float, limit: float) -> str:
    """One buffer against one chip's memory: "grow", "fine", "near" or "over"."""
    share = asked / limit
    if share < 1 / 4:
        return "grow"
    if share < 1 / 2:
        return "fine"
    return "near" if share <= 1 else "over"


_TEXTS = {
    "grow": "the batch can grow",
    "fine": "fine",
    "near": "near the limit",
    "over": "over the limit",
}


def advise(captures: Mapping[str, str]) -> str:
    """A sentence on the sizes in an out-of-memory text; empty where it has none."""
    sizes = {name: logged_bytes(value) for name, value in captures.items()}
    asked, limit = sizes.get("asked_bytes"), sizes.get("limit_bytes")
    if asked and limit:
        text = _TEXTS[verdict(asked, limit)]
        return f"Asked: {format_bytes(asked)} of {format_bytes(limit)} a chip: {text}."
    wanted, free, piece = (sizes.get(name) for name in ("asked", "free", "reservable"))
    if wanted and free and piece and piece < wanted <= free:
        return (
            f"Asked: {format_bytes(wanted)}; {format_bytes(free)} are free, but only "
            f"{format_bytes(piece)} of them in one piece (fragmentation)."
        )
    if wanted and free and wanted > free:
        return f"Asked: {format_bytes(wanted)}; free: {format_bytes(free)}."
    used, capacity = sizes.get("used"), sizes.get("capacity")
    if used and capacity and used > capacity:
        sizes_text = f"{format_bytes(capacity)} / {format_bytes(used)}"
        return f"Scale the batch by about {capacity / used:.2f} ({sizes_text})."
    return ""
