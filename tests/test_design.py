"""docs/design.md: short items, the tree that exists, commands and public names that exist."""

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


def test_items_are_short():
    prose = re.sub(r"^```.*?^```", "", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert [line[:80] for line in prose.splitlines() if len(line) > LONGEST] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_there(command):
    assert re.search(rf"^\| `{command}[` ]", PAGE, re.MULTILINE)


def test_public_names_are_there():
    part = PAGE.partition("## From Python")[2].partition("## In a notebook")[0]
    assert [name for name in tpukit.__all__ if f"`{name}`" not in part] == []


def test_members_of_the_seam_exist():
    """Those that the page's table of backend members names."""
    part = PAGE.partition("| members |")[2].partition("\n\n")[0]
    rows = [row.split("|")[1] for row in part.splitlines()[2:]]
    named = {name for row in rows for name in re.findall(r"`([a-z_]+)`", row)}
    sources = [path.read_text("utf-8") for path in (ROOT / "tpukit" / "hardware").glob("*.py")]
    members = re.compile(r"^    (?:def )?(\w+)[:(]", re.MULTILINE)
    defined = {name for source in sources for name in members.findall(source)}
    assert len(named) > 10 and named - defined == set()


def test_members_of_task_exist():
    """Each name before a bracket in the first column of the tables about tasks."""
    part = PAGE.partition("## Task")[2].partition("## Backend")[0]
    named = set(re.findall(r"^\| `([a-z_]+)\(", part, re.MULTILINE))
    source = (ROOT / "tpukit" / "train" / "task.py").read_text(encoding="utf-8")
    assert len(named) > 8
    assert [name for name in named if f"    def {name}(" not in source] == []
