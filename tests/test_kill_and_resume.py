"""Killed at any moment and resumed, a run ends in the same bytes as one that was never stopped."""

import json
import uuid

import pytest
from runs import (
    MARK,
    TINY,
    VIRTUAL_TPU,
    killed_sessions,
    latest,
    metrics,
    same_bytes,
    tpukit,
    wait_for_end,
)

KILLS = [
    "build:1", "compile:1", "compile:60", "compile:400", "step:1", "step:3", "copy:1",
    "half:1", "half:2", "half:3", "fsync:1", "fsync:2", "fsync:4", "fsync:5", "rename:1",
    "renamed:1", "replace:2", "rmtree:3", "evaluate:1", "step:5",
]  # fmt: skip
ARGUMENTS = [
    "train", "--task", TINY, "--max-steps", "40", "--log-every", "3", "--ckpt-every", "2",
    "--set", "dropout=0.2", "--num-workers", "1",
]  # fmt: skip


def run_killed(run, hw, kills, env, tmp_path, arguments=ARGUMENTS):
    """The same command again and again, killed at each moment in turn, then left alone."""
    argv = [*arguments, "--hw", *hw, "--results-dir", run]
    mark = uuid.uuid4().hex
    sessions = [(argv, at) for at in (*kills, None)]
    *statuses, last = killed_sessions(tmp_path, sessions, {**env, MARK: mark})
    assert last == 0
    wait_for_end(mark, 5)  # DataLoader workers notice within a moment
    return statuses


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("hw", "env", "kills"),
    [
        (["cpu"], {}, ["half:2", "fsync:4", "rename:1", "replace:2", "step:4"]),
        pytest.param(["cpu"], {}, KILLS, marks=pytest.mark.slow),
        pytest.param(["cpu", "--precision", "fp16", "--lr", "3e-3"], {}, ["half:2", "step:4"],
                     marks=pytest.mark.slow),
        pytest.param(["tpu"], VIRTUAL_TPU, ["compile:60", "half:2", "copy:2"],
                     marks=[pytest.mark.slow, pytest.mark.xla]),
    ],
    ids=["cpu", "every", "fp16-scaler", "xla"],
)  # fmt: skip
def test_killed_runs_end_in_the_same_bytes(tmp_path, hw, env, kills):
    length = 40 if kills is KILLS else 24
    arguments = [*ARGUMENTS, "--max-steps", str(length)]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert tpukit(*arguments, "--hw", *hw, "--results-dir", whole, env=env).returncode == 0
    statuses = run_killed(killed, hw, kills, env, tmp_path, arguments=arguments)
    assert statuses.count(9) == len(kills), f"every session must have been killed: {statuses}"
    assert same_bytes(killed, whole)
    assert scaler(killed) == scaler(whole) and bool(scaler(whole)) == ("fp16" in hw)
    assert steps_in_log(killed) == steps_in_log(whole)


def scaler(run):
    """The fp16 gradient scaler as the newest checkpoint holds it."""
    return json.loads((latest(run) / "state.json").read_text())["scaler"]


def steps_in_log(run):
    """What was logged at which step: nothing is missing and nothing is there twice."""
    return [(row["step"], row["kind"], row.get("loss")) for row in metrics(run)]


RANK_KILLS = ["step:3:1", "half:2:0"]
IN_ANY_RANK = ("build", "step", "evaluate", "copy")
MORE_RANK_KILLS = [
    f"{at}:{index % 2 if at.startswith(IN_ANY_RANK) else 0}"
    for index, at in enumerate(KILLS)
    if not at.startswith("compile")
] + ["step:2:0", "evaluate:1:0", "copy:1:1"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kills", [RANK_KILLS, MORE_RANK_KILLS])
def test_two_ranks_killed_end_in_the_same_bytes(tmp_path, kills):
    """Ranks as torchrun starts them; the run that is never stopped goes through torchrun itself."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    hw = ["cpu", "--devices", "2"]
    done = tpukit(*ARGUMENTS, "--hw", *hw, "--results-dir", whole)
    assert done.returncode == 0, done.stderr[-3000:]
    statuses = run_killed(killed, hw, kills, {}, tmp_path)
    assert statuses.count(9) == len(kills), f"every session must have been killed: {statuses}"
    assert same_bytes(killed, whole)
