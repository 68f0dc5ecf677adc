"""The table of names that releases lost, held against the releases that are installed."""

import importlib
from importlib.metadata import version

import pytest

from tpukit.knowledge.releases import lost_name

GONE = {"numpy": ("2.4", "product"), "huggingface_hub": ("2", "HfFolder"),
        "transformers": ("5", "AutoModelForVision2Seq")}  # fmt: skip
"""Library -> the release that the table is about, and a name in it."""


@pytest.mark.parametrize("library", GONE)
def test_what_the_installed_release_has_is_not_called_lost(library):
    release, gone = GONE[library]
    if not version(library).startswith(f"{release}."):
        pytest.skip(f"needs {library} {release}")
    module = importlib.import_module(library)
    assert lost_name(library, gone) is not None and not hasattr(module, gone)
    assert [name for name in dir(module) if lost_name(library, name)] == []
