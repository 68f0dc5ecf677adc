# ruff: noqa: E501 - a case is one line
"""What is not called the cause: quotations, what a run survived, a progress bar's updates."""

import pytest
from cases import read_cases
from explained_logs import KEY_ERROR, OOM, STEPS, TORCHRUN, causes, explained

from tpukit.probe.logs.log_text import drop_updates

CASES = read_cases(__file__)


# -- quotations -------------------------------------------------------------------------------------
def test_a_quotation_is_not_an_error():
    assert [text for text in CASES["quotations"]["logs"] if causes(text)] == []


def test_an_error_that_looks_like_a_quotation():
    assert [text for text in CASES["errors"]["logs"] if causes(text) != ["cuda-oom"]] == []


def test_information_of_nccl_names_no_cause():
    missing = (
        "Plugin load (libx.so): libx.so: cannot open shared object file: No such file or directory"
    )
    assert causes(f"host:81:90 [0] NCCL INFO NET/Plugin : {missing}") == []
    assert causes(f"host:81:90 [0] NCCL WARN NET/Plugin : {missing}") == ["shared-library-missing"]


# -- what a run survived ----------------------------------------------------------------------------
@pytest.mark.parametrize("error", [OOM, KEY_ERROR])
def test_a_run_that_went_on_has_no_cause(error):
    assert causes(f"{error}\n{STEPS}") == []
    assert causes(f"{STEPS}\n{error}") != []


def test_an_exception_that_the_program_says_it_does_without():
    said = "A matching Triton is not available, some optimizations will not be enabled\n"
    assert causes(said + KEY_ERROR) == []
    assert causes("epoch 3 begins\n" + KEY_ERROR) == ["key-missing"]


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


def test_a_launchers_warning_is_a_consequence_where_something_failed():
    closing = "W1120 10:00:01.000 5150 torch/distributed/elastic/api.py:897] Sending process 5160 closing signal SIGTERM"
    assert [e.role for e in explained(closing)] == ["warning"]
    assert [e.role for e in explained(f"{OOM}\n{closing}")] == ["cause", "consequence"]


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
