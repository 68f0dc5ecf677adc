# ruff: noqa: E501 - a case is one line
"""Which line of a log is called the cause, and which is not: each rule with its near-miss."""

from __future__ import annotations

import pytest

from tpukit.knowledge.error_table import known_errors
from tpukit.probe.logs.explain import LogExplainer, unpack
from tpukit.probe.logs.explanations import Explanation, shorten
from tpukit.probe.logs.log_text import clean_lines, drop_updates
from tpukit.probe.logs.raised_causes import FAILED_CHECK, REPORTED, UNKNOWN

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
KEY_ERROR = """Traceback (most recent call last):
  File "/work/train.py", line 40, in <module>
    main()
  File "/work/train.py", line 31, in main
    loss = step(batch["labels"])
           ~~~~~^^^^^^^^^^
  File "/usr/lib/python3.12/site-packages/datasets/row.py", line 9, in __getitem__
    return self.data[key]
KeyError: 'labels'
"""
TORCHRUN = """E1120 10:00:01.000 5150 torch/distributed/elastic/multiprocessing/api.py:882] failed (exitcode: 1) local_rank: 1 (pid: 5161) of binary: /usr/bin/python3
Traceback (most recent call last):
  File "/usr/bin/torchrun", line 8, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
"""
STEPS = "\n".join(f"step {i} loss 2.{i}" for i in range(100, 110))


def explained(text: str) -> list[Explanation]:
    explainer = LogExplainer(known_errors())
    explainer.feed(list(clean_lines(unpack(list(enumerate(text.split("\n"), start=1))))))
    return explainer.explanations()


def causes(text: str) -> list[str]:
    return [e.id for e in explained(text) if e.role == "cause"]


# -- an exception that no table knows ---------------------------------------------------------------
@pytest.mark.parametrize("text", [KEY_ERROR + TORCHRUN, TORCHRUN + KEY_ERROR])
def test_unknown_exception_beside_a_cascade_is_the_cause(text):
    first = explained(text)[0]
    assert (first.role, first.text) == ("cause", "KeyError: 'labels'")
    assert "`KeyError: 'labels'`" in first.cause
    assert 'Raised at /work/train.py, line 31: `loss = step(batch["labels"])`' in first.cause
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
    assert "Raised at /work/train.py, line 31" in known[0].cause


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


@pytest.mark.parametrize(
    ("log", "id"),
    [
        ("terminate called after throwing an instance of 'c10::Error'\n  what():  frob is odd\n", FAILED_CHECK.id),
        ("F1120 10:00:00.123 4711 frob.cc:12] Check failed: frob == 3", FAILED_CHECK.id),
        ("error: the frobnicator is odd", REPORTED.id),
    ],
)  # fmt: skip
def test_failures_without_a_traceback(log, id):
    assert causes(log) == [id]


@pytest.mark.parametrize(
    "log",
    ["W1120 10:00:00.123 4711 frob.cc:12] Check failed softly", "errors: 0", "error rate: 0.13",
     "/a/b.py:3: UserWarning: frob is odd\n  warn(x)", "Traceback (most recent call last):"],
)  # fmt: skip
def test_what_is_not_a_failure(log):
    assert causes(log) == []


# -- quotations -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "text",
    [
        'The message "CUDA out of memory. Tried to allocate 2.00 GiB" names the process.',
        "If you see RuntimeError: CUDA out of memory. Tried to allocate, halve the batch.",
        "train.py:12:    raise RuntimeError('CUDA out of memory. Tried to allocate')",
        "docs/faq.md:7:CUDA out of memory. Tried to allocate 2 GiB",
        "8f14e45 Handle CUDA out of memory. Tried to allocate",
        "commit c9f0f89 Retry on CUDA out of memory. Tried to allocate",
        "+    raise RuntimeError('CUDA out of memory. Tried to allocate')",
        "somebody saw `RuntimeError: CUDA out of memory. Tried to\nallocate 2 GiB` yesterday",
    ],
)
def test_a_quotation_is_not_an_error(text):
    assert causes(text) == []


@pytest.mark.parametrize(
    "text",
    [
        OOM,
        "RuntimeError: CUDA out of memory. Tried to allocate, if you see this halve the batch",
        "!!! ERROR during execution: CUDA out of memory. Tried to allocate 2.00 GiB",
        "2026-11-20 10:00:00,123 - trainer - ERROR - when saving: CUDA out of memory. Tried to allocate",
        '{"error": "CUDA out of memory. Tried to allocate 2.00 GiB"}',
        "/work/train.py:12: RuntimeError: CUDA out of memory. Tried to allocate",
        "Exception in device=GPU:0: CUDA out of memory. Tried to allocate",
    ],
)
def test_an_error_that_looks_like_a_quotation(text):
    assert causes(text) == ["cuda-oom"]


# -- what a run survived ----------------------------------------------------------------------------
@pytest.mark.parametrize("error", [OOM, KEY_ERROR])
def test_a_run_that_went_on_has_no_cause(error):
    assert causes(f"{error}\n{STEPS}") == []
    assert causes(f"{STEPS}\n{error}") != []


def test_a_run_that_went_on_and_failed_later():
    log = f"{KEY_ERROR}\n{STEPS}\n{OOM}\n{TORCHRUN}"
    assert causes(log) == ["cuda-oom"]


def test_another_rank_that_prints_does_not_make_it_survive():
    by_rank = "\n".join(f"[rank1]: {line}" for line in KEY_ERROR.splitlines())
    others = "\n".join(f"[rank0]: {line}" for line in STEPS.splitlines())
    first = explained(f"{by_rank}\n{others}")[0]
    assert (first.role, first.stream) == ("cause", "1")
    assert "rank 1" in first.cause


def test_a_loss_that_stays_nan_is_not_survived():
    assert causes("loss: nan\n" + STEPS) == ["loss-nan"]


def test_retries_and_warnings():
    retry = "Max retries exceeded with url: /gpt2/resolve/main/config.json on huggingface.co"
    assert causes(f"WARNING: {retry}; retrying in 5 s\nloaded") == []
    assert causes(f"HTTPError: {retry}; retrying in 5 s\nrequests.exceptions.ConnectionError: {retry}") == ["hub-unreachable"]  # fmt: skip
    assert (
        causes("The client socket has failed to connect to [localhost]:12355 (errno: 99 - x).")
        == []
    )
    assert causes("The client socket has timed out after 900s while trying to connect to (a, 1)") == ["rendezvous-timeout"]  # fmt: skip


# -- progress bars ----------------------------------------------------------------------------------
def test_progress_of_a_thousand_updates_on_one_line():
    bar = "\r".join(
        f"{i / 10:5.1f}%|{'█' * (i // 50)}{' ' * (20 - i // 50)}| {i}/1000 [00:{i % 60:02}<00:10, 3.{i}it/s]"
        for i in range(1001)
    )
    found = explained(f"start\n{bar}\r{OOM}\r{bar[-80:]}\nend")
    assert [(e.id, e.line) for e in found] == [("cuda-oom", 2)]
    assert len(drop_updates(bar)) <= 3


# -- texts that led astray --------------------------------------------------------------------------
def test_pjrt_versions():
    note = "I0000 00:00:1 8 pjrt_api.cc:146] The PJRT plugin has PJRT API version 0.94. The framework PJRT API version is 0.93."
    assert [e.role for e in explained(note)] == ["harmless"]
    wrong = "RuntimeError: Mismatched PJRT plugin PJRT API version (0.47) and framework PJRT API version 0.40"
    assert causes(wrong) == ["pjrt-api-mismatch"]


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
    load = 'Traceback (most recent call last):\n  File "/work/a.py", line 1, in f\n    x = torch.load(path)\nEOFError: Ran out of input\n'
    assert causes(spawn) == []
    assert causes(load) == ["torch-file-damaged"]
    pickled = "AttributeError: Can't pickle local object 'f.<locals>.g'\n"
    assert causes(spawn + pickled) == ["cannot-pickle"]


# -- the answers ------------------------------------------------------------------------------------
FOR_TPUKIT_ALONE = ("--num-workers", "--precision", "--accumulate", "--devices", "--hw ", "--memory-limit", "--global-batch-size", "--results-dir", "--block-size")  # fmt: skip


def test_advice_names_no_option_of_another_program():
    wrong = {e.id for e in known_errors() if any(option in e.fix for option in FOR_TPUKIT_ALONE)}
    assert wrong <= {"xla-defaulting-to-cpu"}


def test_places_in_texts_are_filled_from_the_log():
    for entry in known_errors():
        places = [name for text in (entry.cause, entry.fix) for name in _places(text)]
        for expression in entry.message:
            assert set(places) <= set(expression.groupindex), entry.id
    text = "Exception: The TPU is already in use by process with pid 4711."
    assert "kill 4711" in explained(text)[0].fix


def _places(text: str) -> list[str]:
    import re

    return re.findall(r"\{(\w+)\}", text)


def test_words_are_not_cut():
    assert shorten("one two three", 100) == "one two three"
    assert shorten("one two threefold", 12) == "one two ..."
    assert len(shorten("x" * 500, 100)) < 110
