# ruff: noqa: E501 - a case is one line
"""Forms and families of errors that no entry was written for: what the answer may and must say."""

import pytest
from cases import read_cases
from explained_logs import causes, explained

from tpukit.knowledge.error_table import known_errors
from tpukit.probe.logs import explain_log, open_log

CASES = read_cases(__file__)
TB = CASES["texts"]["TB"]
LIBRARY = f'  File "{CASES["texts"]["SITE"]}{{}}", line 7, in {{}}\n    f(x)\n'
KEYS = 'RuntimeError: Error(s) in loading state_dict for Net:\n\tMissing key(s) in state_dict: "{}layer.0.norm.weight", "{}layer.0.norm.bias"{}.\n\tUnexpected key(s) in state_dict: "{}layer.0.norm.bias", "{}layer.0.norm.weight". '


def test_the_first_answer_is_the_cause_and_says_what_is_to_do():
    wrong = {}
    for name, (id, word, log) in CASES["first-answer"].items():
        first = explained(log)[0]
        if (first.id, first.role) != (id, "cause") or word not in f"{first.cause} {first.fix}":
            wrong[name] = [(each.id, each.role) for each in explained(log)]
    assert wrong == {}


def test_every_text_of_a_family_is_explained_first():
    texts = [(id, text) for id, family in CASES["families"].items() for text in family]
    assert [(id, text) for id, text in texts if [e.id for e in explained(text)][:1] != [id]] == []


def test_a_text_that_only_looks_like_a_family():
    near = CASES["near-misses"].items()
    assert [(id, text) for text, id in near if explained(text)[0].id != id] == []


def test_the_words_that_an_explanation_must_have():
    said = {
        KEYS.format(
            "model.", "model.", "", "", ""
        ): "differ by the prefix `model.`, which those of the file lack",
        KEYS.format("", "", ', "a.b.c"' * 60, "_orig_mod.", "_orig_mod."): "Strip `_orig_mod.`",
        KEYS.format(
            "enc.layers.1.", "enc.layers.2.", "", "", ""
        ): "these are another model's weights".capitalize(),
        **CASES["words"],
    }
    for text, words in said.items():
        first = explained(text)[0]
        assert words in f"{first.cause} {first.fix}", text


def test_what_is_needed_for_a_kernel_is_not_a_kernel_that_failed():
    for message, id in CASES["not-a-kernel"].items():
        first = explained(TB + LIBRARY.format("frob/core.py", "f") + message)[0]
        assert first.id != id and first.role == "cause", message


def test_what_a_program_lives_without_is_no_cause():
    assert [log for log in CASES["survived"]["logs"] if causes(log)] == []


def test_an_exception_of_a_library_is_explained_by_where_it_comes_from():
    imported = TB + LIBRARY.format("frob/__init__.py", "<module>") + "FrobError: too old"
    first = explained(imported)[0]
    assert (
        "`frob` raised it while it was imported" in first.cause
        and "one small batch" not in first.fix
    )
    called = explained(TB + LIBRARY.format("frob/core.py", "check") + "FrobError: too odd")[0]
    assert (
        "`frob` (core.py:7) refuses what train.py:3 gives" in called.cause
        and "train.py:3" in called.fix
    )
    assert "print the values" in explained(TB + "FrobError: too odd")[0].fix


def test_only_a_text_with_one_cause_is_certain():
    sure = {entry.id for entry in known_errors() if entry.is_certain}
    assert {"unscale-fp16-gradients", "fp16-on-xla"} <= sure
    assert not {"nccl-remote-error", "cuda-no-driver", "package-build-failed"} & sure


def test_a_symptom_alone_is_the_cause_and_a_launchers_report_is_not():
    assert causes("Segmentation fault (core dumped)") == ["segmentation-fault"]
    assert causes("Sending process 12 closing signal SIGTERM") == []
    assert causes("Segmentation fault (core dumped)\n" + TB + "KeyError: 'a'") == ["key-missing"]


@pytest.mark.parametrize(
    ("log", "has_error"),
    [("step 1 loss 2.0\nstep 2 loss 1.9\n0 errors, 2 steps", False), ("step 1\nerror: frob it", True),
     (TB + "FrobError: odd", True), ("Exception ignored in: <generator f at 0x1>\n" + TB + "FrobError: odd", False), ("UserWarning: frob is deprecated", False)],
)  # fmt: skip
def test_an_error_is_seen_or_not(tmp_path, log, has_error):
    path = tmp_path / "log"
    path.write_text(log)
    assert explain_log(open_log(str(path), 20.0), known_errors()).has_error == has_error


def test_your_line_is_named_where_only_the_outer_exception_shows_it():
    inner = TB.replace("/code/train.py", "/usr/lib/python3.12/site-packages/frob/core.py")
    link = "\nThe above exception was the direct cause of the following exception:\n\n"
    first = explained(f"{inner}KeyError: 'speed'\n{link}{TB}KeyError: 'speed'")[0]
    assert "Raised at /code/train.py, line 3" in first.cause
