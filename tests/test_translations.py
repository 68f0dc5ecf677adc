"""Pages in two languages: the same commands, headings, links and numbers."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [
    "README.md", "docs/images.md", "docs/install.md", "docs/kaggle.md", "docs/own_task.md",
]  # fmt: skip
SHORTER = ["docs/doctor.md", "docs/llm.md", "docs/python.md"]
"""Pages whose translation leaves parts out."""


def pair(name):
    """An English page and its translation."""
    path = ROOT / name
    return [p.read_text(encoding="utf-8") for p in (path, path.with_suffix(".zh.md"))]


def blocks(page):
    """The code blocks without comments."""
    found = re.findall(r"^```\w*\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    return [re.sub(r" +#.*", "", block) for block in found]


def prose(page):
    return re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)


def headings(page):
    return [len(marks) for marks in re.findall(r"^(#+) ", prose(page), re.MULTILINE)]


def commands(page):
    """What stands between backticks, in no order: sentences are built differently."""
    return sorted(re.findall(r"`([^`]+)`", prose(page)))


def numbers(page):
    """Numbers of the text, those in commands and addresses left out."""
    text = re.sub(r"`[^`]+`|\]\([^)]*\)", "", prose(page))
    return sorted(re.findall(r"\d+(?:[.,]\d+)*", text))


def links(page):
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", prose(page))
    return sorted(target.replace(".zh.md", ".md") for target in targets)


@pytest.mark.parametrize("part", [blocks, headings, commands, numbers, links])
@pytest.mark.parametrize("name", PAGES)
def test_both_languages_have_the_same(name, part):
    english, chinese = map(part, pair(name))
    assert english and english == chinese


@pytest.mark.parametrize("part", [blocks, commands])
@pytest.mark.parametrize("name", SHORTER)
def test_a_shorter_translation_has_nothing_that_its_page_lacks(name, part):
    english, chinese = map(part, pair(name))
    assert chinese and [each for each in chinese if each not in english] == []


@pytest.mark.parametrize("name", [*PAGES, *SHORTER])
def test_the_languages_link_to_each_other(name):
    english, chinese = pair(name)
    file = Path(name)
    assert f"[中文]({file.with_suffix('.zh.md').name})" in english
    assert f"[English]({file.name})" in chinese


@pytest.mark.parametrize("name", [*PAGES, *SHORTER])
def test_a_chinese_page_leads_to_chinese_pages(name):
    page = (ROOT / name).with_suffix(".zh.md")
    targets = re.findall(r"\]\(([^)#:]+\.md)[^)]*\)", page.read_text(encoding="utf-8"))
    translated = [page.parent / t for t in targets if not t.endswith(".zh.md")]
    english = {file.name for file in translated if file.with_suffix(".zh.md").exists()}
    assert english == {Path(name).name}
