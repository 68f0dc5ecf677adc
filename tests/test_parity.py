"""The same run on any hardware, however it is cut, ends in the same weights."""

import pytest
from runs import (
    TINY,
    VIRTUAL_TPU,
    parameters,
    ranks_of,
    relative_difference,
    result,
    script,
    tpukit,
)

STEPS = ["--max-steps", "20", "--lr", "1e-3", "--precision", "fp32", "--ckpt-every", "20", "--json"]
WAYS = {
    "xla-8": (["--hw", "tpu"], VIRTUAL_TPU),
    "xla-8-sharded": (["--hw", "tpu", "--shard"], VIRTUAL_TPU),
    "xla-8-accumulate-2": (["--hw", "tpu", "--accumulate", "2"], VIRTUAL_TPU),
    "accumulate-4": (["--hw", "cpu", "--accumulate", "4"], {}),
    "two-ranks": (["--hw", "cpu", "--devices", "2"], {}),
    "two-ranks-accumulate-2": (["--hw", "cpu", "--devices", "2", "--accumulate", "2"], {}),
}


LAUNCHED = "two-ranks"
"""Of the ways with two ranks the one that starts them with torchrun, as a user's command does."""


def train(run, task, arguments, env, ranks=1):
    command = ["train", "--task", task, *STEPS, "--results-dir", run, *arguments]
    return result(tpukit(*command, env=env, ranks=ranks))


@pytest.fixture(scope="module")
def reference(request, tmp_path_factory):
    """A task and its run on one CPU process."""
    task = TINY.replace(":Tiny", f":{request.param}")
    run = tmp_path_factory.mktemp("reference") / "run"
    train(run, task, ["--hw", "cpu"], {})
    return task, run


WEIGHTED = {"xla-8-accumulate-2", "accumulate-4", "two-ranks-accumulate-2"}
"""The ways that the task with weights goes; `Tiny` goes the others."""


def cases(ways):
    """(task, way) with their marks."""
    for way in ways:
        task = "Weighted" if way in WEIGHTED else "Tiny"
        yield pytest.param(task, way, marks=[pytest.mark.xla] * ("xla" in way))


@pytest.mark.parametrize(("reference", "way"), [*cases(WAYS)], indirect=["reference"])
def test_parameters_agree_after_20_steps(tmp_path, reference, way):
    task, whole = reference
    ranks = 1 if way == LAUNCHED else ranks_of(WAYS[way][0])
    summary = train(tmp_path / "run", task, *WAYS[way], ranks)
    assert relative_difference(parameters(tmp_path / "run"), parameters(whole)) < 1e-4
    assert relative_difference(parameters(tmp_path / "run", "ema"), parameters(whole, "ema")) < 1e-4
    if "xla" in way:
        one_graph_each(summary, accumulates="accumulate" in way)


def one_graph_each(summary, *, accumulates):
    """One train graph (or one a micro-batch and one that applies), one evaluation graph."""
    assert summary["graphs"]["train"] == (2 if accumulates else 1)
    assert summary["graphs"]["evaluate"] == 1
    assert summary["compilations_after_warmup"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reference", "way"), [*cases(["two-ranks", "xla-8"])], indirect=["reference"]
)
def test_without_the_reduction_they_do_not_agree(tmp_path, reference, way):
    """What shows that the test above can fail."""
    task, whole = reference
    arguments, env = WAYS[way]
    command = ["train", "--task", task, *STEPS, "--results-dir", tmp_path / "run", *arguments]
    done = script("without_reduction.py", *command, env=env, ranks=ranks_of(arguments))
    assert done.returncode == 0, done.stderr[-3000:]
    assert relative_difference(parameters(tmp_path / "run"), parameters(whole)) > 1e-3
