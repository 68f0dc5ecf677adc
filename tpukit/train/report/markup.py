"""Pieces of a page: text and numbers as they may stand in it, tables of names and values."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping
from typing import Any

from tpukit.io.secrets import HIDDEN, without_secrets

LONGEST_TEXT = 2000
"""Characters of one value."""
MOST_ROWS = 200
"""Maximum rows of one table."""


def escaped(value: Any) -> str:
    """A value as it may stand in the page: escaped, without secrets, not too long."""
    text = without_secrets(str(value))
    return html.escape(text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]} ...")


def joined(parts: Iterable[str]) -> str:
    """Pieces one after the other."""
    return "\n".join(parts)


def number_text(value: float) -> str:
    """`1,200`, `0.4100`, `1.234e-05`."""
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:#.4g}"


def value_table(rows: Mapping[str, Any], kind: str = "") -> str:
    """Names and values, those of secrets hidden."""
    lines = []
    for name, value in list(rows.items())[:MOST_ROWS]:
        hidden = HIDDEN in without_secrets(f"{name}={value}")
        lines.append(
            f"<tr><th>{escaped(name)}</th><td>{escaped(HIDDEN if hidden else value)}</td></tr>"
        )
    return f'<div class="wide"><table class="{kind}"><tbody>{joined(lines)}</tbody></table></div>'
