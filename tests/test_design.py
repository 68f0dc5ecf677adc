"""docs/design.md: short items, the tree that exists, commands and public names that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tpukit
from tpukit.cli import COMMANDS

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
LONGEST = 300
"""Characters of a paragraph, an item or a table's row."""


def tree(page):
    """Each folder of the package that the page's tree shows, and each file."""
    [block] = re.findall(r"^```\n(tpukit/\n.*?)^```", page, re.MULTILINE | re.DOTALL)
    shown, above = [], []
    for line in block.split("\ntests/")[0].splitlines():
        indent, name = re.match(r"( *)(\S+)", line).groups()
        if len(indent) <= 4:
            above = [*above[: len(indent) // 2], name]
            shown.append("".join(above))
    return shown


def package():
    """Folders of the package with their folders, and the files beside them."""
    top = ROOT / "tpukit"
    folders = [p for p in (top, *top.glob("*"), *top.glob("*/*")) if p.is_dir()]
    files = [p for p in top.glob("*.py") if p.stem not in ("__init__", "__main__")]
    named = [f"{p.relative_to(ROOT)}/" for p in folders if p.name != "__pycache__"]
    return {*named, *(str(p.relative_to(ROOT)) for p in files)}


def test_the_tree_is_the_packages():
    shown = tree(PAGE)
    assert len(shown) == len(set(shown))
    assert {*shown} == package()


def test_a_folder_that_is_missing_is_found():
    without = re.sub(r"^    logs/.*\n", "", PAGE, flags=re.MULTILINE)
    assert package() - {*tree(without)} == {"tpukit/probe/logs/"}


def test_items_are_short():
    prose = re.sub(r"^```.*?^```", "", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert [line[:80] for line in prose.splitlines() if len(line) > LONGEST] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_there(command):
    assert re.search(rf"^\| `{command}[` ]", PAGE, re.MULTILINE)


def test_public_names_are_there():
    part = PAGE.partition("## From Python")[2].partition("## In a notebook")[0]
    assert [name for name in tpukit.__all__ if f"`{name}`" not in part] == []
