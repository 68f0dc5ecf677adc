"""What pages name exists: commands and options, links, files, `make` targets, public names."""

import dataclasses
import re
import shlex
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

import tpukit
from tpukit.cli import COMMANDS, load_command
from tpukit.registry.classes import find_task
from tpukit.registry.declared import registered
from tpukit.train.config import TrainConfig

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "notebooks/*.md", ".github/**/*.yml", "tests/README.md")
    for path in ROOT.glob(pattern)
    if path.name != "CHANGELOG.md"
)
MARKDOWN = [page for page in PAGES if page.suffix == ".md"]
DESIGN = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")


def name_of(page):
    return str(page.relative_to(ROOT))


def prose(text):
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


# -- commands --------------------------------------------------------------------------------------
@cache
def options(command):
    """The options of a command, with those of its subcommands and of the installed tasks.

    A hidden one is a former name, which only says what took its place.
    """
    found = set()
    for task in registered():
        ways = [load_command(command, ["--task", task])]
        ways += [*getattr(ways[0], "commands", {}).values()]
        shown = (p for way in ways for p in way.params if not getattr(p, "hidden", False))
        found |= {option for p in shown for option in (*p.opts, *p.secondary_opts)}
    return found | {"--help"}


def command_lines(text):
    """Each `tpukit COMMAND ...` of a text, to the end of its code."""
    text = text.replace("\\\n", " ")
    return re.findall(r"(?<![\w./%-])%?tpukit ([a-z-]+)((?:[ \t][^`\n|;]*)?)", text)


def unknown(text):
    """(command, option) that neither the command line has nor a task that the text declares."""
    declared = {f"--{name}" for name in re.findall(r"^    (\w+): ", text, re.MULTILINE)}
    for command, rest in command_lines(text):
        if command not in COMMANDS:
            continue
        line = rest.partition(" #")[0].partition(" -- ")[0]
        named = {word.partition("=")[0] for word in re.findall(r"(?<=\s)--[a-z][\w=-]*", line)}
        if not re.search(r"\.py:|\w\.\w+:", line):
            yield from ((command, option) for option in sorted(named - options(command) - declared))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_have_the_options_that_pages_give(page):
    assert [*unknown(page.read_text(encoding="utf-8"))] == []


@cache
def settings():
    """What `--set` takes: fields of the training's settings and of the installed tasks'."""
    kinds = (TrainConfig, *(find_task(name).options for name in registered()))
    return {field.name for kind in kinds for field in dataclasses.fields(kind)}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_settings_that_pages_give_exist(page):
    text = page.read_text(encoding="utf-8")
    declared = set(re.findall(r"^    (\w+): |\b(\w+)=[\w\"']+[,)]", text, re.MULTILINE))
    lines = [line for line in text.replace("\\\n", " ").splitlines() if ".py:" not in line]
    named = {name for line in lines for name in re.findall(r"--set '?([a-z_0-9]+)=", line)}
    assert sorted(named - settings() - {name for pair in declared for name in pair}) == []


def test_an_option_that_does_not_exist_is_found():
    assert [*unknown("`tpukit train --learning-speed 3`, `tpukit run -- x --y`")] == [
        ("train", "--learning-speed")
    ]
    assert [*unknown("tpukit train --task a.py:A --depth 2\ntpukit data eit --n 3  # --z")] == []
    assert shlex.split(command_lines("!tpukit train --lr 1 \\\n  --seed 2")[0][1])[-1] == "2"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_in_the_design(command):
    assert re.search(rf"^\| `{command}[` ]", DESIGN, re.MULTILINE)


def test_public_names_are_in_the_design():
    part = DESIGN.partition("## From Python")[2].partition("## In a notebook")[0]
    assert [name for name in tpukit.__all__ if f"`{name}`" not in part] == []


# -- links and files -------------------------------------------------------------------------------
def places(page):
    """Addresses of a page's headings, as code hosts make them."""
    titles = re.findall(r"^#+ (.*)$", prose(page.read_text(encoding="utf-8")), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
    again = {f"{title}-{n}" for title, count in Counter(plain).items() for n in range(1, count)}
    return {*plain, *again}


@pytest.mark.parametrize("page", MARKDOWN, ids=name_of)
def test_links_lead_somewhere(page):
    text = re.sub(r"`[^`]*`", "", prose(page.read_text(encoding="utf-8")))
    for target, _, place in re.findall(r"\]\(([^)#:\s]*)(#([^)]*))?\)", text):
        there = (page.parent / target).resolve() if target else page
        assert there.exists(), target
        assert not place or place in places(there), f"{target}#{place}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_of_the_checkout_exist(page):
    text = page.read_text(encoding="utf-8")
    folders = "tpukit|tests|scripts|docs|benchmarks|notebooks"
    named = re.findall(rf"`((?:python )?(?:{folders})/[\w./-]*)", text)
    paths = [name.removeprefix("python ") for name in named if "NAME" not in name]
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_pages_that_messages_name_exist():
    sources = [*(ROOT / "tpukit").rglob("*.py"), *(ROOT / "tpukit").glob("knowledge/tables/*.toml")]
    named = {
        path
        for source in sources
        for path in re.findall(r"\b(docs/[\w/]+\.(?:md|py))", source.read_text(encoding="utf-8"))
    }
    assert len(named) >= 5
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_make_targets_exist(page):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    text = page.read_text(encoding="utf-8")
    assert set(re.findall(r"(?:`|run: )make ([a-z]+)\b", text)) <= targets
