"""Cases that are data: the TOML file beside a test."""

import tomllib
from pathlib import Path
from typing import Any


def read_cases(test: str) -> dict[str, Any]:
    """The tables of the file beside `test`, in which `{NAME}` stands for a text of `[texts]`."""
    tables = tomllib.loads(Path(test).with_suffix(".toml").read_text(encoding="utf-8"))
    texts = tables.get("texts", {})
    return {name: filled(table, texts) for name, table in tables.items()}


def filled(value: Any, texts: dict[str, str]) -> Any:
    """A text of `[texts]` may contain those above it."""
    if isinstance(value, dict):
        return {name: filled(inner, texts) for name, inner in value.items()}
    if isinstance(value, list):
        return [filled(inner, texts) for inner in value]
    if isinstance(value, str):
        for name, text in reversed(texts.items()):
            value = value.replace(f"{{{name}}}", text)
    return value
