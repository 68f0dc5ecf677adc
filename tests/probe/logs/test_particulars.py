"""What an answer takes over from the traceback: values, callers, lines, releases."""

import importlib.util
from importlib.metadata import version

import pytest
from explained_logs import explained
from runs import python

from tpukit.probe.logs.explanations import fill

START = (
    'Traceback (most recent call last):\n  File "/code/train.py", line 88, in <module>\n    run()\n'
)


def frame(path: str, code: str, where: str = "f") -> str:
    path = path if path.startswith("/") else f"/usr/lib/python3.12/site-packages/{path}"
    return f'  File "{path}", line 7, in {where}\n    {code}\n'


def answer(*parts: str) -> str:
    first = explained(START + "".join(parts))[0]
    return f"{first.cause} {first.fix}"


def marked(path: str, code: str, value: str, index: str) -> str:
    indent = " " * (4 + code.index(value + index))
    return frame(path, code) + f"{indent}{'~' * len(value)}{'^' * len(index)}\n"


@pytest.mark.parametrize(
    ("code", "value", "index"),
    [("a = ids[row] + mask[row]", "mask", "[row]"), ("a = ids[row] + mask[row]", "ids", "[row]"),
     ("x = self.of(i)[0] + y[1]", "self.of(i)", "[0]")],
)  # fmt: skip
def test_the_value_that_python_marks_is_the_one_that_is_none(code, value, index):
    log = marked("frob/core.py", code, value, index)
    said = answer(log, "TypeError: 'NoneType' object is not subscriptable\n")
    assert f"`{value}` is None in `frob` (core.py:7)" in said


def test_without_marks_all_values_that_it_can_be_are_named():
    said = answer(
        frame("frob/core.py", "a = ids[row] + mask[row]"),
        "TypeError: 'NoneType' object is not subscriptable\n",
    )
    assert "`ids` or `mask` is None" in said
    many = "+".join(f"v{i}[0]" for i in range(9))
    assert " or `v1`" not in answer(
        frame("frob/core.py", many), "TypeError: 'NoneType' object is not subscriptable\n"
    )


@pytest.mark.parametrize("call", ['cfg["actor"].pop("rate")', "cfg['actor']['rate']"])
def test_a_missing_key_names_the_dictionary_and_its_reader(call):
    said = answer(frame("frob/core.py", f"x = {call}"), "KeyError: 'rate'\n")
    assert "has no key `rate`, which `frob` (core.py:7) reads" in said
    assert '`cfg["actor"]`' in said.replace("'actor'", '"actor"')
    assert "Change what train.py:88 gives to `frob`" in said


def test_a_lookup_of_a_library_is_read_by_its_caller():
    own = frame("/code/train.py", "y = batch.speed * 2", where="run")
    inner = frame("frob/row.py", "raise AttributeError(name)", where="__getattr__")
    said = answer(own, inner, "AttributeError: 'FrobRow' object has no attribute 'speed'\n")
    assert "`FrobRow` (`batch`) has no `speed`" in said


@pytest.mark.parametrize(
    ("caller", "words"),
    [
        (frame("trainy/loop.py", "frob.step(x)"), "-U trainy` (its loop.py:7 calls it)"),
        (frame("/ui/custom_nodes/nodely/n.py", "frob.step(x)"), "Update the plug-in `nodely`"),
        ("", "Change what train.py:88 gives to `frob`"),
        (frame("torch/nn/modules/module.py", "forward_call()"), "Change what train.py:88 gives"),
    ],
)  # fmt: skip
def test_who_has_to_change_is_the_caller(caller, words):
    assert words in answer(caller, frame("frob/core.py", "check(x)"), "FrobError: too odd\n")


def test_an_exception_of_ones_own_code_names_its_line():
    said = answer(frame("/code/data.py", "assert rows == columns"), "AssertionError\n")
    assert "`rows == columns` does not hold in data.py:7" in said
    assert "The place to change is data.py:7" in said


@pytest.mark.parametrize(
    ("message", "setting"),
    [("the key must be one that is there: ['loss', 'frob_total', 'step']", "that value"),
     ("frob_total must be larger than 3, not among [1, 2]", "`frob_total`")],
)  # fmt: skip
def test_a_name_in_a_list_is_no_setting_to_change(message, setting):
    said = answer(frame("frob/core.py", "check(x)"), f"ValueError: {message}\n")
    assert f"Print {setting}" in said


def test_the_lines_below_an_exception_belong_to_its_message():
    log = frame("frob/core.py", "check(x)") + "FrobError: frob_launcher refuses it.\n"
    said = answer(log, "Number of frobs (32) must be equal to number of columns (64).\n")
    assert "does not hold: Number of frobs (32) must be equal to number of columns (64)" in said
    assert "columns (64)" not in answer(log, "\nfrobs (32) must be equal to columns (64).\n")


def test_a_release_that_the_log_names_and_what_broke():
    log = "frob 1\ntransformers==5.1.0\n" + START + frame("/code/a.py", "m.speed", where="g")
    first = explained(log + "AttributeError: 'FrobModel' object has no attribute 'speed'\n")[0]
    assert "The log names transformers 5.1.0." in first.cause
    assert "'transformers<5'" in first.fix and "Change a.py:7" in first.fix


def test_the_installed_release_is_named_only_for_a_log_of_this_machine():
    failed = python("-c", "from transformers import frobnicate").stderr
    here = f"Installed here: transformers {version('transformers')}."
    assert here in explained(failed)[0].cause
    file = importlib.util.find_spec("transformers").origin
    others = [failed.replace(file, "/nowhere/transformers/__init__.py"),
              failed.replace(f" ({file})", ""), f"torch==0.4.1\n{failed}"]  # fmt: skip
    for log in others:
        first = explained(log)[0]
        assert first.id == "name-not-in-module" and "Installed here" not in first.cause


def test_a_fault_without_code_of_the_users_is_told_as_the_librarys():
    vllm = "/opt/venv/lib/python3.12/site-packages/vllm/v1/engine/core.py"
    log = f'Traceback (most recent call last):\n  File "{vllm}", line 7, in run\n    x = a[0]\n'
    said = explained(f"{log}IndexError: list index out of range\n")[0].fix
    assert "No code of yours takes part: a fault of that release" in said
    assert "pip install -U vllm" in said and "that line" not in said
    refused = explained(f"{log}ValueError: frob is refused\n")[0].fix
    assert "No code of yours takes part" in refused and "a fault of" not in refused
    own = explained(START + frame(vllm, "x = a[0]") + "IndexError: list index out of range\n")[
        0
    ].fix
    assert "Print its length before train.py:88" in own


@pytest.mark.parametrize(
    ("line", "sure"),
    [("ValueError: Attempting to unscale FP16 gradients.", "certain"),
     ("frob/kernel.cu (line 3): Attempting to unscale FP16 gradients.", "probable")],
)  # fmt: skip
def test_a_text_within_another_message_is_not_certain(line, sure):
    assert explained(line)[0].confidence == sure


def test_parts_of_a_text_without_their_values_are_left_out():
    text = "[[`{a}` of {b}|A value]] fails[[ in {c}]]."
    assert fill(text, {"a": "x", "b": "y", "c": "z"}) == "`x` of y fails in z."
    assert fill(text, {"a": "x"}) == "A value fails."
    assert fill('`[[{a}|x]]["k"]`', {}) == '`x["k"]`'
