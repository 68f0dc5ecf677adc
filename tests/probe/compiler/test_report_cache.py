"""Answers are kept by everything that decides them."""

from __future__ import annotations

from pathlib import Path

from tpukit.probe.compiler.report_cache import AnswerCache, cache_folder

PARTS = {"program": "abc", "topology": "v5e:2x2", "effort": "fast"}


def test_an_answer_comes_back_for_the_same_parts_only(tmp_path):
    cache = AnswerCache(tmp_path)
    assert cache.read(PARTS) is None
    cache.write(PARTS, {"total": 5})
    assert cache.read(dict(reversed(PARTS.items()))) == {"total": 5}
    assert cache.read({**PARTS, "effort": "full"}) is None
    assert [p.suffix for p in cache.folder.iterdir()] == [".json"]


def test_a_damaged_file_is_no_answer(tmp_path):
    cache = AnswerCache(tmp_path)
    cache.write(PARTS, {"total": 5})
    cache.path(PARTS).write_text('{"total": ')
    assert cache.read(PARTS) is None


def test_a_folder_that_cannot_be_written_is_no_failure(tmp_path):
    (tmp_path / "compiled").write_text("a file")
    AnswerCache(tmp_path).write(PARTS, {"total": 5})
    assert AnswerCache(tmp_path).read(PARTS) is None


def test_the_folder_follows_the_environment():
    assert cache_folder({"TPUKIT_CACHE_DIR": "/c"}) == Path("/c")
    assert cache_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/tpukit")
    assert cache_folder({}).name == "tpukit"
