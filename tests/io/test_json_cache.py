"""JSON objects are kept by everything that decides them."""

from tpukit.io.folders import JsonCache

KEY = {"program": "abc", "topology": "v5e:2x2", "effort": "fast"}


def test_a_report_comes_back_for_the_same_key_only(tmp_path):
    cache = JsonCache(tmp_path / "compiled", 3)
    assert cache.read(KEY) is None
    cache.write(KEY, {"total": 5})
    assert cache.read(dict(reversed(KEY.items()))) == {"total": 5}
    assert cache.read({**KEY, "effort": "full"}) is None
    assert [p.suffix for p in cache.folder.iterdir()] == [".json"]


def test_a_damaged_file_counts_as_none(tmp_path):
    cache = JsonCache(tmp_path / "compiled", 3)
    cache.write(KEY, {"total": 5})
    cache.path(KEY).write_text('{"total": ')
    assert cache.read(KEY) is None


def test_a_folder_that_cannot_be_written_is_no_failure(tmp_path):
    (tmp_path / "compiled").write_text("a file")
    JsonCache(tmp_path / "compiled", 3).write(KEY, {"total": 5})
    assert JsonCache(tmp_path / "compiled", 3).read(KEY) is None
