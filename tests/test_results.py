"""The pages of results are what their scripts write from the JSON files, with stale ones marked."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = ("stale", "write_results", "tpu_batches", "tpu_predictions", "deciding_code")


@pytest.fixture(scope="module")
def stale():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        import stale
    yield stale
    for name in SCRIPTS:
        del sys.modules[name]


@pytest.fixture
def script(stale):
    return stale.write_results


@pytest.fixture
def fresh(stale, tmp_path, monkeypatch):
    """The results as if today's code had decided all of them."""
    code_of = sys.modules["deciding_code"].code_of
    for path in stale.RESULTS.glob("*.json"):
        value = json.loads(path.read_text(encoding="utf-8"))
        if path.stem in stale.DECIDES:
            value["code"] = code_of(path.stem)
        (tmp_path / path.name).write_text(json.dumps(value), encoding="utf-8")
    for module in (stale, stale.write_results):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    monkeypatch.setattr(stale.tpu_batches, "RESULT", tmp_path / "batches.json")
    monkeypatch.setattr(stale.tpu_predictions, "RESULT", tmp_path / "predictions.json")
    return tmp_path


def change(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | values))


@pytest.mark.parametrize("name", ["write_results", "tpu_batches", "tpu_predictions"])
def test_the_page_is_what_the_files_say(stale, name):
    module = getattr(stale, name)
    page = module.page() if name == "write_results" else module.page(module.kept())
    assert module.PAGE.read_text(encoding="utf-8") == page, (
        "run `python benchmarks/stale.py --pages`: a result, or the code that decides one, changed"
    )


def test_every_file_is_on_the_page(script):
    text = script.page()
    assert [path.name for path in script.RESULTS.glob("*.json") if path.name not in text] == []


# -- which code decided a result ------------------------------------------------------------------
def test_every_result_keeps_what_decided_it_and_says_how_it_is_measured(stale):
    assert {*stale.MEASUREMENTS} == {*stale.DECIDES}
    rows = {"tpu_batches", "tpu_predictions"}
    assert {path.stem for path in stale.RESULTS.glob("*.json")} == {*stale.DECIDES} | rows
    kept = [json.loads((stale.RESULTS / f"{n}.json").read_text()) for n in stale.DECIDES]
    kept += [*stale.tpu_batches.kept().values(), *stale.tpu_predictions.kept().values()]
    assert all(len(value["code"]) == 12 for value in kept)


def test_words_decide_nothing_and_code_does(stale):
    digest = sys.modules["deciding_code"].digest
    plain = digest([("a.py", "def f(x):\n    return x\n")])
    worded = '"""A module."""\n\n# One.\ndef f(x):\n    """x.\n\n    y\n    """\n\n    return x\n'
    assert digest([("a.py", worded)]) == plain
    assert digest([("a.py", "def f(x):\n    return x + 1\n")]) != plain
    assert digest([("b.py", "def f(x):\n    return x\n")]) != plain
    assert digest([("a.toml", "# a\n")]) != digest([("a.toml", "# b\n")])


def test_a_file_that_is_missing_is_named(stale):
    with pytest.raises(FileNotFoundError, match=r"tpukit/moved\.py decides a result"):
        [*sys.modules["deciding_code"].sources(["tpukit/moved.py"])]


def test_a_result_of_other_code_is_marked_and_listed(stale, fresh, capsys, monkeypatch):
    line = "[summarize_rows.json](../benchmarks/results/summarize_rows.json)"
    assert [*stale.stale()] == [] and f"{line}; " in stale.write_results.page()
    change(fresh / "summarize_rows.json", code="0123456789ab")
    assert f"{line} †; " in stale.write_results.page()
    monkeypatch.setattr(sys, "argv", ["stale.py"])
    stale.main()
    assert capsys.readouterr().out.startswith("summarize_rows: summarize_rows.py --out benchmarks/")


def test_a_row_of_other_code_is_marked_and_asked_again(stale, fresh, monkeypatch):
    tpu_batches = stale.tpu_batches
    row = {"largest": 8, "recommended": 8, "parameters": 2e7, "memory": {"parameters": 2**30},
           "limit_bytes": 2**34, "step": {"flops": 1e12, "estimate_seconds": 0.1}, "trials": [],
           "compiles": 3, "asked": "2026-01-02", "versions": {}}  # fmt: skip
    now = sys.modules["deciding_code"].code_of("images")
    rows = {"ResNet-50 | v5e-1": {**row, "code": now}, "ViT-B/16 | v5e-1": {**row, "code": "old"}}
    tpu_batches.RESULT.write_text(json.dumps(rows))
    page = tpu_batches.page(tpu_batches.kept())
    assert "| ResNet-50 | 20 M" in page and "| ViT-B/16 † | 20 M" in page
    assert [name for name, _ in stale.stale()] == ["tpu_batches: ViT-B/16 | v5e-1"]
    asked = []
    monkeypatch.setattr(tpu_batches, "row", lambda words, *_: asked.append(words) or row)
    monkeypatch.setattr(tpu_batches, "PAGE", fresh / "page.md")
    words = ["tpu_batches.py", "--only", "ResNet-50", "ViT-B/16"]
    monkeypatch.setattr(sys, "argv", words)
    tpu_batches.main()
    assert [words[3] for words in asked] == ["model=vit_base_patch16_224"]


def test_writing_a_result_keeps_the_digest_and_no_place_of_this_machine(stale, tmp_path):
    path = tmp_path / "summarize_rows.json"
    deciding = sys.modules["deciding_code"]
    places = [f"{deciding.ROOT}/tpukit/cli.py:1", f"{Path(pytest.__file__).parents[1]}/a.py:2"]
    deciding.write_result(path, {"rows": 3, "places": places})
    code = deciding.code_of("summarize_rows")
    written = {"rows": 3, "places": ["tpukit/cli.py:1", "a.py:2"], "code": code}
    assert json.loads(path.read_text()) == written
