"""The page of measured results is what its script writes from the JSON files."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import write_results

    yield write_results
    del sys.modules["write_results"]


def test_the_page_is_what_the_files_say(script):
    assert script.PAGE.read_text(encoding="utf-8") == script.page(), (
        "run `python benchmarks/write_results.py`"
    )


def test_every_file_is_on_the_page(script):
    text = script.page()
    assert [path.name for path in script.RESULTS.glob("*.json") if path.name not in text] == []


def test_another_number_is_another_page(script, tmp_path, monkeypatch):
    before = script.page()
    for path in script.RESULTS.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    changed = tmp_path / "summarize_rows.json"
    values = json.loads(changed.read_text()) | {"rows": 1234}
    changed.write_text(json.dumps(values))
    monkeypatch.setattr(script, "RESULTS", tmp_path)
    assert "1,234 dialogues" in script.page() != before
