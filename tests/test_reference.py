"""docs/reference.md is what scripts/reference.py writes of the code."""

import sys
from pathlib import Path

import pytest
from runs import printed, python

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def reference():
    sys.path.insert(0, str(ROOT / "scripts"))
    import reference

    yield reference
    sys.path.remove(str(ROOT / "scripts"))
    del sys.modules["reference"]


def test_the_page_is_written_from_the_code(reference):
    assert reference.PAGE.read_text(encoding="utf-8") == reference.page(), (
        "run python scripts/reference.py"
    )


def test_the_json_fields_are_those_of_the_code(reference):
    texts = reference.texts()["json"]
    assert reference.json_problems(texts) == []
    texts["probe-batch"]["fields"].pop("accumulate")
    texts["doctor"]["fields"]["never_written"] = ""
    assert reference.json_problems(texts) == [
        "probe-batch: accumulate is not explained", "doctor: nothing writes never_written",
    ]  # fmt: skip


def test_every_variable_of_the_package_is_explained(reference):
    assert {*reference.texts()["variables"]} == reference.variable_names()


def test_every_method_of_task_is_in_one_phase(reference):
    phases = reference.texts()["task"]
    assert reference.task_problems(phases) == []
    phases["each sample"] = ["no_method"]
    assert reference.task_problems(phases) == [
        "Task.draw is in no phase", "Task.no_method does not exist",
    ]  # fmt: skip


def test_it_is_written_without_torch():
    code = "import sys; sys.path.insert(0, 'scripts'); import reference; reference.page();"
    printed(python("-c", f"{code} assert 'torch' not in sys.modules", cwd=ROOT))
