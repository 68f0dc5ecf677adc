"""Ranks of one host: a restart by itself, and the words of the rank that failed."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist
from fake_backend import FakeBackend
from runs import TINY, environment, result, same_bytes, tpukit, wait_until

from tpukit.cli import main
from tpukit.errors import InterruptedRunError, UsageError
from tpukit.hardware import select
from tpukit.hardware.launch.failures import is_lost_connection
from tpukit.hardware.launch.launcher import STATUS_VARIABLE
from tpukit.hardware.options import HardwareOptions
from tpukit.train.resume import require_same_nodes

TRAIN = ["train", "--task", TINY, "--hw", "cpu", "--ckpt-every", "5", "--max-steps", "300"]


class TwoRanks(FakeBackend):
    """The other rank is on a node whose values are `other`."""

    def __init__(self, other):
        super().__init__()
        self.other = other

    def all_gather_objects(self, value):
        return [value, ("second", self.other)]


def test_a_node_that_differs_is_named_with_the_values():
    facts = {"torch": "2.9.0", "tpukit": "0.2.0"}
    require_same_nodes(TwoRanks(facts), facts)
    with pytest.raises(
        UsageError, match=r"node second \(rank 1\) .*: torch 2.8.0 \(rank 0: 2.9.0\)"
    ):
        require_same_nodes(TwoRanks({**facts, "torch": "2.8.0"}), facts)


def test_a_users_own_words_of_a_connection_are_no_lost_rank(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=1))

    def ask_in_words():
        raise RuntimeError("NCCL is needed here")

    def ask_a_rank_that_never_answers():
        store.get("its address")

    errors = []
    for ask in (ask_in_words, ask_a_rank_that_never_answers):
        with pytest.raises(RuntimeError) as raised:
            ask()
        errors.append(raised.value)
    assert [is_lost_connection(error) for error in errors] == [False, True]


@pytest.fixture
def of_two_ranks(monkeypatch):
    """What `opened_backend` opens: it lists how often its process group was destroyed."""
    backend, destroyed = FakeBackend(), []
    backend.world_size = 2
    backend.collectives.close = lambda: destroyed.append(True)
    monkeypatch.setattr(select, "open_backend", lambda *_: backend)
    return destroyed


@pytest.mark.parametrize(
    ("error", "destroyed"),
    [(None, 1), (InterruptedRunError("stopped", signal_number=15), 1), (RuntimeError("CUDA"), 0),
     (KeyboardInterrupt(), 0)],
)  # fmt: skip
def test_the_process_group_is_destroyed_where_all_ranks_do_that(of_two_ranks, error, destroyed):
    with suppress(BaseException), select.opened_backend(HardwareOptions(hw="cpu")):
        if error:
            raise error
    assert len(of_two_ranks) == destroyed


def test_a_failure_leaves_the_group_alone_at_the_process_end_too(of_two_ranks):
    for raises in (False, True):
        with suppress(ValueError), select.opened_backend(HardwareOptions(hw="cpu"), once=False):
            if raises:
                raise ValueError
    select._AT_EXIT.close()
    assert not of_two_ranks


@pytest.mark.parametrize(
    ("variables", "ends_at_once"),
    [({"RANK": "1"}, True), ({"RANK": "1", STATUS_VARIABLE: "folder"}, False), ({}, False)],
)
def test_a_failed_rank_of_torchrun_s_own_ends_at_once(monkeypatch, variables, ends_at_once):
    """Under tpukit's launcher it has its exit code to leave first."""
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(sys, "argv", ["tpukit", "train", "--no-such-option"])
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert ended == ([2] if ends_at_once else [])


@pytest.mark.slow
def test_a_killed_rank_is_restarted_from_the_last_checkpoint(tmp_path):
    command = [*TRAIN, "--devices", "2", "--results-dir"]
    started = subprocess.Popen(
        [sys.executable, "-m", "tpukit", *command, str(tmp_path / "run"), "--max-restarts", "2"],
        env=environment(), stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_until((tmp_path / "run" / "checkpoints" / "latest").exists, started)
    ranks = [p for p in psutil.Process(started.pid).children(recursive=True)
             if p.environ().get("RANK") == "1"]  # fmt: skip
    os.kill(ranks[0].pid, signal.SIGKILL)
    told = started.communicate(timeout=240)[1]
    assert started.returncode == 0, told[-2000:]
    result(tpukit(*command, tmp_path / "whole", "--json"))
    assert same_bytes(tmp_path / "run", tmp_path / "whole")
