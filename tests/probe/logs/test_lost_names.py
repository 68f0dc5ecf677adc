"""What the tables of releases say of names, held against the releases that are installed."""

import fnmatch
import functools
import importlib
import re
from importlib.metadata import version
from pathlib import Path

import pytest

from tpukit.knowledge import releases
from tpukit.knowledge.releases import lost_name, unfolded

GONE = {"numpy": ("2.4", "product"), "huggingface_hub": ("2", "HfFolder"),
        "transformers": ("5", "AutoModelForVision2Seq")}  # fmt: skip
"""Library -> the release that the table is about, and a name that it lacks."""


@functools.cache
def words_of_tables():
    tables = Path(releases.__file__).parent.joinpath("tables").rglob("*.toml")
    texts = [text for table in tables for text in (table.read_text(), unfolded(table.read_text()))]
    return {word for text in texts for word in re.findall(r"\w+", text)}


@pytest.mark.parametrize(
    "library", [pytest.param(n, marks=pytest.mark.slow) if n == "transformers" else n for n in GONE]
)
def test_what_the_installed_release_has_is_not_called_lost(library):
    release, gone = GONE[library]
    if not version(library).startswith(f"{release}."):
        pytest.skip(f"needs {library} {release}")
    module = importlib.import_module(library)
    lost = lost_name(library, gone)
    assert lost is not None and lost.range.startswith("<") and gone not in dir(module)
    names = dir(module)
    told = words_of_tables() & {*names}
    forms = re.findall(r"(?<= )[^\s>]*\*[^\s>]*", releases._history(library).names)
    told |= {name for form in forms for name in fnmatch.filter(names, form)}
    found = {name: lost_name(library, name, version(library)) for name in told}
    assert [name for name, lost in found.items() if lost and lost.range.startswith("<")] == []


@pytest.mark.parametrize(
    ("place", "name", "release", "range_", "new"),
    [
        ("transformers", "AutoModelForVision2Seq", "", "<5.0", "AutoModelForImageTextToText"),
        ("Trainer.__init__", "tokenizer", "", "<5.0", "processing_class"),
        ("huggingface_hub", "HfFolder", "", "<1.0", "get_token() and login()"),
        ("transformers.models", "qwen3_5_moe", "5.0.0", ">=5.2", ""),
    ],
)
def test_a_name_is_told_with_the_release_in_which_it_went_or_came(
    place, name, release, range_, new
):
    lost = lost_name(place, name, release)
    assert lost is not None and (lost.range, lost.new) == (range_, new)


def test_a_release_that_has_the_name_is_not_said_to_lack_it():
    assert lost_name("transformers.models", "qwen3_5_moe", "5.3.0") is None
    assert lost_name("huggingface_hub", "HfFolder", "0.36.0") is None


def test_a_folded_line_has_the_names_that_it_stands_for():
    folded = (
        "a.b: <5.0 GLM|Config|MoeModel X.size .shape X.make.of .on>by move>c.d. old>new >=5.1 y"
    )
    assert unfolded(folded) == (
        "a.b: <5.0 GLMConfig GLMMoeModel X.size X.shape X.make.of X.make.on>by move>c.d.move"
        " old>new >=5.1 y"
    )


@pytest.mark.parametrize(
    ("name", "release", "range_"),
    [
        ("TFBertModel", "", "<5.0"),
        ("FlaxBertModel", "5.2", "<5.0"),
        ("TFTrainer", "", "<4.37"),
        ("TF_BERT_PRETRAINED_MODEL_ARCHIVE_LIST", "", "<4.37"),
        ("TFMistralModel", "", "<5.0"),
        ("TFMistralModel", "4.41.2", ">=4.44"),
    ],
)
def test_a_name_of_a_form_that_went_is_lost(name, release, range_):
    assert lost_name("transformers", name, release).range == range_


def test_a_name_that_several_libraries_changed_is_told_of_none(monkeypatch):
    def history(library):
        is_changed = library in ("timm", "peft")
        return releases._History(f"{library}.core: <0.3 frob frob.speed" if is_changed else "")

    monkeypatch.setattr(releases, "_history", history)
    assert lost_name("frob", "speed") is None
    assert lost_name("timm.core", "frob").library == "timm"


def test_a_short_attribute_that_came_later_needs_the_release_that_lacks_it(monkeypatch):
    names = "peft.v1: >=0.12 Checkpointer.restore Checkpointer.restore_all"
    monkeypatch.setattr(
        releases, "_history", lambda of: releases._History(names if of == "peft" else "")
    )
    assert lost_name("Checkpointer", "restore") is None
    assert lost_name("Checkpointer", "restore", "0.11").range == ">=0.12"
    assert lost_name("Checkpointer", "restore_all").range == ">=0.12"


def test_no_release_is_named_that_was_not_compared(monkeypatch):
    """0.4.3 to 0.4.5 may have the name or not: the pin does not reach beyond 0.4.2."""
    history = releases._History("jax: <0.4.6 frob <0.4.2 old", ["0.4.3", "0.4.4", "0.4.5"],
                                ["0.4.1", "0.4.2", "0.4.6"])  # fmt: skip
    monkeypatch.setattr(
        releases, "_history", lambda of: history if of == "jax" else releases._History()
    )
    assert lost_name("jax", "frob").range == "<0.4.3"
    assert lost_name("jax", "old").range == "<0.4.2"
    assert lost_name("jax", "frob", "0.4.4") is None
