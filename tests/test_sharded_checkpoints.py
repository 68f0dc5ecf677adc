"""Checkpoints that ranks write in shards: any number of ranks goes on from them."""

import pickle
import random

import pytest
import torch
from runs import (
    TINY,
    killed_sessions,
    latest,
    metrics,
    parameters,
    result,
    same_bytes,
    script,
    tpukit,
)

from tpukit.errors import CheckpointError
from tpukit.train.checkpoint import open_checkpoint
from tpukit.train.shards import INDEX_FILE, Shards

CONTAINER = TINY.replace(":Tiny", ":Container")
FILES = ("model", "ema", "optimizer")


def train(ranks, run, steps, *more, task=CONTAINER):
    """A run, or what is left of it, by so many ranks with `--shard`; of 1, by one process."""
    hardware = ["--devices", ranks, "--shard"] if ranks > 1 else []
    done = tpukit(
        "train", "--task", task, "--hw", "cpu", *hardware, "--results-dir", run, "--max-steps",
        steps, "--set", "width=8195", "--num-workers", "0", *more, ranks=ranks,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def copied(run, out, ranks):
    """What so many ranks loaded of a run, and saved."""
    done = script("copied_run.py", run, out, *([ranks] if ranks > 1 else []), ranks=ranks)
    assert done.returncode == 0, done.stderr[-3000:]
    return out


@pytest.fixture(scope="module")
def of_two(tmp_path_factory):
    """A run of two ranks."""
    run = tmp_path_factory.mktemp("two") / "run"
    train(2, run, 20)
    return run


@pytest.mark.parametrize("chain", [[4, 1], pytest.param([1, 4, 8, 2], marks=pytest.mark.slow)])
def test_any_number_of_ranks_has_the_same_state_to_the_bit(tmp_path, of_two, chain):
    """8195 rows are not divisible, and made after the model; the container's matrix is on every
    rank."""
    run = of_two
    for place, ranks in enumerate(chain):
        run = copied(run, tmp_path / f"{place}-of-{ranks}", ranks)
        assert (latest(run) / INDEX_FILE).exists() == (ranks > 1)
    before, after = open_checkpoint(latest(of_two)), open_checkpoint(latest(run))
    assert before.state == after.state and before.artifacts() == after.artifacts()
    for file in FILES:
        expected, found = before.tensors(file), after.tensors(file)
        assert expected.keys() == found.keys() and expected
        assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_one_process_tests_it(tmp_path, of_two):
    whole = copied(of_two, tmp_path / "whole", 1)
    for file in ("config.toml", "metrics.jsonl"):
        (whole / file).write_bytes((of_two / file).read_bytes())
    told = [
        result(tpukit("test", "--run", run, "--hw", "cpu", "--json")) for run in (of_two, whole)
    ]
    assert told[0] == told[1]


@pytest.mark.parametrize("name", ["__1_0.distcp", INDEX_FILE])
def test_damage_to_a_shard_is_noticed(tmp_path, of_two, name):
    copy = copied(of_two, tmp_path / "copy", 2)
    damaged = bytearray((latest(copy) / name).read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (latest(copy) / name).write_bytes(damaged)
    with pytest.raises(CheckpointError, match=f"{name} is damaged"):
        open_checkpoint(latest(copy))


def test_hosts_that_share_no_folder_are_told(tmp_path, of_two):
    done = script("copied_run.py", of_two, tmp_path / "host-RANK", 2, ranks=2)
    assert done.returncode != 0
    assert "lie on several hosts: __1_0.distcp is not in" in done.stderr
    assert not [*tmp_path.glob("host-0/checkpoints/step-*")]


def test_an_index_runs_no_code(tmp_path):
    (tmp_path / INDEX_FILE).write_bytes(pickle.dumps(print))
    with pytest.raises(pickle.UnpicklingError, match=r"builtins\.print is not a part"):
        Shards(tmp_path)


SOME = ["half:1:1", "copy:2:0"]
KILLS = [
    *SOME, "build:1:1", "step:1:0", "copy:1:1", "half:1:0", "fsync:1:0", "fsync:1:1", "fsync:2:0",
    "fsync:3:0", "rename:1:0", "renamed:1:0", "rename:2:0", "replace:2:0", "rmtree:1:0",
    "evaluate:1:1", "step:3:1",
]  # fmt: skip


def at_random(ranks: int) -> list[str]:
    """Fifty kills of any rank, within the first four steps of a session."""
    draws = random.Random(ranks)
    return [f"moment:{draws.randrange(1000)}:{draws.randrange(ranks)}" for _ in range(50)]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("ranks", "kills"),
    [
        pytest.param(2, SOME, marks=pytest.mark.slow),
        pytest.param(2, KILLS, marks=pytest.mark.slow),
        pytest.param(4, KILLS, marks=pytest.mark.slow),
        pytest.param(2, at_random(2), marks=pytest.mark.slow),
        pytest.param(4, at_random(4), marks=pytest.mark.slow),
    ],
)
def test_killed_ranks_end_in_the_same_bytes(tmp_path, ranks, kills):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    steps = 4 * len(kills) + 2
    more = ["--ckpt-every", "2", "--set", "dropout=0.2", "--log-every", "3"]
    train(ranks, whole, steps, *more)
    argv = [
        "train", "--task", CONTAINER, "--hw", "cpu", "--devices", ranks, "--shard",
        "--results-dir", killed, "--max-steps", steps, "--set", "width=8195", "--num-workers", "0",
        *more,
    ]  # fmt: skip
    *statuses, last = killed_sessions(tmp_path, [(argv, at) for at in (*kills, None)])
    assert (last, statuses.count(9)) == (0, len(kills)), statuses
    assert same_bytes(killed, whole)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_changes_of_the_number_of_ranks_leave_the_losses(tmp_path):
    whole, changed = tmp_path / "whole", tmp_path / "changed"
    draws = random.Random(0)
    how = ["--log-every", "1", "--ckpt-every", "4", "--set", "schedule=constant"]
    train(1, whole, 44, *how)
    ranks = [2]
    for stop in range(4, 45, 4):
        train(ranks[-1], changed, stop, *how)
        ranks.append(draws.choice([n for n in (1, 2, 4) if n != ranks[-1]]))
    losses = [
        {row["step"]: row["loss"] for row in metrics(run) if row["kind"] == "train"}
        for run in (whole, changed)
    ]
    assert len(losses[0]) == 44 and losses[1] == pytest.approx(losses[0], abs=1e-6)
    expected, found = parameters(whole), parameters(changed)
    assert all(torch.allclose(expected[n], found[n], rtol=1e-5, atol=1e-6) for n in expected)
