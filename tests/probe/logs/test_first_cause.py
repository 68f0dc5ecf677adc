# ruff: noqa: E501 - a case is one line
"""Which line of a log is called the cause: each rule with its near-miss."""

import pytest
from cases import read_cases
from explained_logs import KEY_ERROR, OOM, TORCHRUN, causes, explained

from tpukit.probe.logs.raised_causes import REPORTED, UNKNOWN

CASES = read_cases(__file__)
KEYWORD = CASES["texts"]["KEYWORD"]


# -- an exception that no table knows ---------------------------------------------------------------
@pytest.mark.parametrize("text", [KEY_ERROR + TORCHRUN, TORCHRUN + KEY_ERROR])
def test_unknown_exception_beside_a_cascade_is_the_cause(text):
    first = explained(text)[0]
    assert (first.role, first.text) == ("cause", "KeyError: 'labels'")
    assert "`KeyError: 'labels'`" in first.cause
    assert 'Raised at /code/train.py, line 31: `loss = step(batch["labels"])`' in first.cause
    assert causes(text) == ["key-missing"]


def test_cascade_alone_names_no_cause():
    assert causes(TORCHRUN) == []
    assert explained(TORCHRUN)[0].role == "consequence"


@pytest.mark.parametrize("report", ["torch.multiprocessing.spawn.ProcessRaisedException:",
    "RuntimeError: An issue was found when launching the training:"])  # fmt: skip
def test_exception_of_a_spawned_process(report):
    log = f"{report}\n\n-- Process 2 terminated with the following error:\n" + KEY_ERROR
    first, *others = explained(log)
    assert first.text == "KeyError: 'labels'"
    assert [e.id for e in others] == ["spawned-process-failed"]
    assert "torchrun" not in " ".join(e.fix for e in others)


def test_an_exception_of_an_unknown_class():
    first = explained(KEY_ERROR.replace("KeyError: 'labels'", "my.data.RowIsOdd: row 3"))[0]
    assert (first.id, first.confidence) == (UNKNOWN.id, "probable")
    assert "my.data.RowIsOdd: row 3" in first.cause


def test_a_text_of_the_table_beats_the_class_and_names_the_line():
    known = explained(KEY_ERROR.replace("KeyError: 'labels'", OOM))
    assert [e.id for e in known] == ["cuda-oom"]
    assert "Raised at /code/train.py, line 31" in known[0].cause


@pytest.mark.parametrize(
    ("between", "named"),
    [
        ("\nThe above exception was the direct cause of the following exception:\n\n", "KeyError"),
        ("\nDuring handling of the above exception, another exception occurred:\n\n", "ValueError"),
        ("\n", "KeyError"),
    ],
)
def test_chained_exceptions(between, named):
    """What was raised while an expected exception was handled counts, not that one."""
    log = KEY_ERROR + between + KEY_ERROR.replace("KeyError: 'labels'", "ValueError: no such row")
    assert explained(log)[0].text.startswith(named)


def test_exception_of_a_data_worker():
    log = KEY_ERROR.replace(
        "'labels'", "Caught KeyError in DataLoader worker process 0."
    ) + KEY_ERROR.replace("Traceback", "Original Traceback")
    found = explained(log)
    assert [(e.id, e.text) for e in found] == [("key-missing", "KeyError: 'labels'")]


def test_exception_in_a_notebook():
    log = """---------------------------------------------------------------------------
FrobError                                 Traceback (most recent call last)
Cell In[3], line 5
      3 x = 1
----> 5 frob(x)

File /usr/lib/python3.12/site-packages/frob/core.py:12, in frob(x)
     10 def frob(x):
---> 12     raise FrobError("odd")

FrobError: odd"""
    first = explained(log)[0]
    assert first.text == "FrobError: odd"
    assert "Raised at Cell In[3], line 5: `frob(x)`" in first.cause.replace("In [3]", "Cell In[3]")


def test_a_failure_that_is_told_without_a_traceback_or_its_class():
    failures = CASES["failures"].items()
    assert [(log, id) for log, id in failures if causes(log) != [id]] == []


def test_what_tells_of_no_failure_has_no_cause():
    assert [log for log in CASES["none"]["logs"] if causes(log)] == []


@pytest.mark.parametrize(
    ("message", "id"),
    [(KEYWORD, "keyword-not-taken"), ("list index out of range", "index-too-high"),
     ("mat1 and mat2 shapes cannot be multiplied (466816x1 and 128x3)", "linear-input-size"),
     ("the frob is odd today", REPORTED.id)],
)  # fmt: skip
def test_a_class_that_the_log_does_not_have_is_not_printed(message, id):
    first = explained(f"!!! Exception during processing !!! {message}")[0]
    assert (first.id, first.role) == (id, "cause")
    assert first.cause.startswith(f"`{message}`")
    assert f"`TypeError: {message}`" in explained(f"TypeError: {message}")[0].cause


def test_an_exception_that_python_ignored():
    ignored = "Exception ignored in: <function Loader.__del__ at 0x7f>\n"
    assert causes(ignored + KEY_ERROR) == []
    assert causes(ignored + KEY_ERROR + KEY_ERROR.replace("labels", "images")) == ["key-missing"]


def test_the_narrowest_rule_wins():
    for text, id in CASES["narrowest"].items():
        assert causes(KEY_ERROR.replace("KeyError: 'labels'", text)) == [id]


# -- texts that led astray --------------------------------------------------------------------------
def test_pjrt_versions():
    note = "I0000 00:00:1 8 pjrt_api.cc:146] The PJRT plugin has PJRT API version 0.94. The framework PJRT API version is 0.93."
    assert [e.role for e in explained(note)] == ["harmless"]
    wrong = "RuntimeError: Mismatched PJRT plugin PJRT API version (0.47) and framework PJRT API version 0.40"
    assert causes(wrong) == ["libtpu-version"]


def test_exit_by_signal_nine():
    killed = "failed (exitcode: -9) local_rank: 1 (pid: 5161) of binary: /usr/bin/python3"
    first = explained(killed)[0]
    assert (first.id, first.role, first.confidence) == ("host-oom-killed", "cause", "probable")
    assert "Probably" in first.cause
    assert causes(f"{KEY_ERROR}{killed}") == ["key-missing"]
    assert causes(killed.replace("-9", "-6")) == []
    assert causes(killed.replace("-9", "-15")) == []


def test_reservation_by_the_sizes_in_the_text():
    text = "RESOURCE_EXHAUSTED: Attempting to reserve {}G at the bottom of memory. That was not possible. There are {}G free, 0B reserved, and {}G reservable."
    assert "in one piece" in explained(text.format(6.48, 6.78, 3.33))[0].fix
    more_than_free = explained(text.format(3.95, 1.92, 1.92))[0]
    assert "in one piece" not in f"{more_than_free.cause} {more_than_free.fix}"
    assert "free: 1.92 GiB" in more_than_free.fix


def test_offline_switch():
    on = "huggingface_hub.errors.OfflineModeIsEnabled: Cannot reach https://huggingface.co/x: offline mode is enabled."
    first = explained(on)[0]
    assert first.id == "hub-offline-switch"
    assert "HF_HUB_OFFLINE=1" not in f"{first.cause} {first.fix}"
    off = "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='huggingface.co', port=443): Max retries exceeded"
    assert causes(off) == ["hub-unreachable"]


@pytest.mark.parametrize(
    ("name", "id"),
    [("torch_xla' has no attribute '_XLAC", "torch-xla-shadowed"),
     ("torch_xla.core.xla_model' has no attribute 'rendezvous", "torch-xla-too-old"),
     ("torch_xla.core.xla_model' has no attribute 'xrt_world_size", "xla-model-attribute-gone")],
)  # fmt: skip
def test_names_that_torch_xla_lacks(name, id):
    assert causes(f"AttributeError: module '{name}'") == [id]


def test_end_of_input_is_a_damaged_file_or_a_failed_parent():
    spawn = 'Traceback (most recent call last):\n  File "/usr/lib/python3.12/multiprocessing/spawn.py", line 1, in _main\n    self = reduction.pickle.load(from_parent)\nEOFError: Ran out of input\n'
    load = 'Traceback (most recent call last):\n  File "/code/a.py", line 1, in f\n    x = torch.load(path)\nEOFError: Ran out of input\n'
    assert causes(spawn) == []
    assert causes(load) == ["torch-file-damaged"]
    pickled = "AttributeError: Can't pickle local object 'f.<locals>.g'\n"
    assert causes(spawn + pickled) == ["cannot-pickle"]
