"""Names of our settings in other trainers, and the setting that a mistyped name means."""

import difflib
import tomllib
from collections.abc import Iterable
from pathlib import Path

_TABLE = Path(__file__).parent / "tables" / "setting_names.toml"


def nearest_setting(name: str, known: Iterable[str]) -> str | None:
    """The known setting that a mistyped name, or another trainer's, stands for."""
    ours = list(known)
    table: dict[str, list[str]] = tomllib.loads(_TABLE.read_text(encoding="utf-8"))
    meant = {other: own for own, others in table.items() if own in ours for other in others}
    meant |= {own: own for own in ours}
    near = difflib.get_close_matches(name, meant, n=1)
    return meant[near[0]] if near else None
