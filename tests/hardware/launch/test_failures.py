"""Ranks of one host: a restart by itself, and the words of the rank that failed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from runs import TINY, environment, result, same_bytes, tpukit

from tpukit.errors import UsageError
from tpukit.hardware.fake import FakeBackend
from tpukit.train.storage.nodes import require_same_nodes

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


@pytest.mark.slow
def test_a_killed_rank_is_restarted_from_the_last_checkpoint(tmp_path):
    command = [*TRAIN, "--devices", "2", "--results-dir"]
    started = subprocess.Popen(
        [sys.executable, "-m", "tpukit", *command, str(tmp_path / "run"), "--max-restarts", "2"],
        env=environment(), stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while not (tmp_path / "run" / "checkpoints" / "latest").exists():
        assert started.poll() is None
        time.sleep(0.05)
    ranks = [p for p in psutil.Process(started.pid).children(recursive=True)
             if p.environ().get("RANK") == "1"]  # fmt: skip
    os.kill(ranks[0].pid, signal.SIGKILL)
    told = started.communicate(timeout=240)[1]
    assert started.returncode == 0, told[-2000:]
    result(tpukit(*command, tmp_path / "whole", "--json"))
    assert same_bytes(tmp_path / "run", tmp_path / "whole")
