"""Trials in child processes, and what becomes of several ranks' results."""

import json
import sys
from pathlib import Path

import pytest
from runs import SUPPORT, result, script

from tpukit.hardware.launch import launcher
from tpukit.probe.trial import TASK_FACTORY, TaskSource, TrialRequest, TrialSetup
from tpukit.probe.trials.worker import TrialRunner
from tpukit.train.config import TrainConfig

FITS = {"trial": {"batch": 4, "fits": True, "used_bytes": 5}}
FULL = {"trial": {"batch": 4, "fits": False, "error": "CUDA out of memory"}}
LOST = {"error": {"message": "connection lost", "hint": None, "id": "task-failed", "exit_code": 1}}


@pytest.fixture
def result_of(monkeypatch):
    def run(ranks, said: str = "", code: int = 0):
        def launch(arguments, processes, options, *, module):
            folder = Path(arguments[-1]).parent
            for rank, written in enumerate(ranks):
                (folder / f"rank-{rank}").write_text(json.dumps(written))
            print(said, file=sys.stderr)
            return code

        monkeypatch.setattr(launcher, "launch", launch)
        setup = TrialSetup(TaskSource("none:none", {}), TrainConfig(), world_size=2)
        return TrialRunner(setup).result(TrialRequest(4))

    return run


def test_where_all_ranks_fit_the_first_ones_trial_counts(result_of):
    assert result_of([FITS, FITS])["trial"]["used_bytes"] == 5


def test_a_rank_without_memory_is_the_cause_of_the_others_errors(result_of):
    trial = result_of([LOST, FULL], code=1)["trial"]
    assert (trial["fits"], trial["error"]) == (False, "CUDA out of memory")


def test_a_killed_rank_is_the_cause_of_the_others_errors(result_of):
    trial = result_of([LOST], "Rank 1 ended by SIGKILL.", code=1)["trial"]
    assert not trial["fits"]
    assert "SIGKILL" in trial["error"]


def test_an_error_in_one_rank_is_an_error(result_of):
    assert result_of([FITS, LOST], code=1)["error"]["message"] == "connection lost"


def test_ranks_that_end_without_a_result_are_an_error(result_of):
    assert "exit code 3" in result_of([], code=3)["error"]["message"]


def test_a_trial_is_of_the_form_that_it_asks_for():
    spec = {"spec": f"{SUPPORT / 'probe_tasks.py'}:Formed", "settings": {}, "data_path": ""}
    runner = TrialRunner(TrialSetup(TaskSource(TASK_FACTORY, spec), TrainConfig(), "2GB"))
    wide, narrow = (runner.result(TrialRequest(8, form=form))["trial"] for form in (0, 1))
    assert narrow["allocated_bytes"] < 0.5 * wide["allocated_bytes"]


def test_a_gpu_s_library_that_fails_by_the_size_is_short_of_memory(monkeypatch):
    error = RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling cublasCreate")

    def fail(runner, request):
        raise error

    monkeypatch.setattr(TrialRunner, "_measure", fail)
    runner = TrialRunner(TrialSetup(TaskSource("none:none", {}), TrainConfig()))
    assert runner.result(TrialRequest(8, fitted=4))["trial"]["fits"] is False
    for alone in (TrialRequest(8), TrialRequest(4, fitted=8)):
        assert "CUBLAS" in runner.result(alone)["error"]["message"]


def searched(task: str, *batches: int, limit: int = 0, **settings) -> list[dict]:
    """The trials of these batches on a CPU."""
    spec = f"{SUPPORT / 'probe_tasks.py'}:{task}"
    return result(script("searched.py", spec, json.dumps(settings), limit, *batches))


def test_a_trial_after_a_failed_one_has_the_memory_that_it_had_before():
    trials = searched("Hungry", 3, 400, 3, limit=400_000_000)
    assert [trial["fits"] for trial in trials] == [True, False, True]
    assert trials[0]["used_bytes"] == pytest.approx(trials[2]["used_bytes"], rel=0.02)


def test_a_search_says_what_has_fitted():
    trials = searched("Cublas", 4, 8, bad_rows=6, width=64)
    assert [trial["fits"] for trial in trials] == [True, False]
