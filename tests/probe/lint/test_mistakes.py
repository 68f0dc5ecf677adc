"""Mistakes of plain PyTorch code beyond the examples in their classes, and their page."""

from pathlib import Path
from runpy import run_path

import pytest
from cases import read_cases
from scanned import findings, ids

from tpukit.probe.lint.rules import MISTAKES

RULES = {rule.id: rule for rule in MISTAKES}
CASES = read_cases(__file__)
HEAD = CASES["texts"]["HEAD"]
ROOT = Path(__file__).parents[3]


def found(text: str) -> set[str]:
    return {*ids(text)} & {*RULES}


def test_the_page_is_written_from_the_rules():
    assert {*CASES["wrong"], *CASES["right"]} <= set(RULES)
    scripts = run_path(str(ROOT / "scripts" / "doctor_rules.py"))
    assert scripts["PAGE"].read_text(encoding="utf-8") == scripts["page"](), "make docs"


@pytest.mark.parametrize("id", RULES)
def test_a_mistake_is_found_and_what_is_right_is_not(id):
    assert [text for text in CASES["wrong"].get(id, ()) if id not in found(text)] == []
    assert [text for text in CASES["right"].get(id, ()) if id in found(text)] == []


def test_what_other_statements_excuse_is_not_found():
    excused = [(id, code) for id, codes in CASES["excused"].items() for code in codes]
    assert [(id, code) for id, code in excused if id in found(HEAD + code)] == []


def test_of_two_evaluations_of_a_script_one_has_gradients():
    bare = "with torch.no_grad():\n    for x in loader:\n        model(x)\n"
    assert found(HEAD + "model.eval()\n" + bare) == set()
    text = HEAD + "model.eval()\nfor x in loader:\n    model(x)\n" + bare
    assert found(text) == {"eval-with-gradients"}
    # The last eval() of a script is not the one that counts.
    assert found(text.replace("with", "model.eval()\nwith")) == {"eval-with-gradients"}


def test_a_script_is_no_function():
    text = HEAD + "model.eval()\nfor x in loader:\n    model(x)\n"
    assert [f.old for f in findings(text)] == ["the script evaluates"]
