"""`Task.after_step`: what moves once a step, beside a plain loop, however a step is cut."""

import copy

import pytest
import torch
from fake_backend import FakeBackend
from momentum_task import MoCo
from runs import (
    SUPPORT,
    VIRTUAL_TPU,
    killed_sessions,
    parameters,
    ranks_of,
    relative_difference,
    result,
    same_bytes,
    tpukit,
)

from tpukit.train.config import TrainConfig
from tpukit.train.learner import build_learner

ARGUMENTS = [
    "train", "--task", f"{SUPPORT / 'momentum_task.py'}:MoCo", "--precision", "fp32",
    "--num-workers", "0", "--ckpt-every", "2",
]  # fmt: skip
CUT, TWO_RANKS = ["--accumulate", "2"], ["--hw", "cpu", "--devices", "2"]
WAYS = {
    "cut": (["--hw", "cpu", *CUT], {}),
    "two-ranks": ([*TWO_RANKS, *CUT], {}),
    "fsdp-2": ([*TWO_RANKS, "--shard"], {}),
    "xla-4": (["--hw", "tpu", *CUT], {**VIRTUAL_TPU, "CPU_NUM_DEVICES": "4"}),
}
MARKS = {"xla-4": [pytest.mark.slow, pytest.mark.xla], "fsdp-2": pytest.mark.slow}


@pytest.mark.parametrize("pieces", [1, 2])
def test_a_teacher_and_a_queue_move_once_a_step(pieces):
    torch.manual_seed(0)
    backend, task, by_hand = FakeBackend(), MoCo(), MoCo()
    model = task.build_model(None)
    plain, batch = copy.deepcopy(model), torch.randn(6, 2, 8, 8)
    config = TrainConfig(optimizer="sgd", momentum=0.0, clip_norm=0.0, ema_decay=0.5, ema_warmup=0)
    learner = build_learner(task, backend, model, config)
    optimizer = torch.optim.SGD(plain.query.parameters(), 0.1)
    average = copy.deepcopy(plain.state_dict())
    for image, text in batch:
        parts = zip(image.chunk(pieces), text.chunk(pieces), strict=True)
        micro = [{"image": i, "text": t, "mask": torch.ones(len(i))} for i, t in parts]
        learner.train_step(micro, 0.1)
        optimizer.zero_grad()
        by_hand.loss(plain, {"image": image, "text": text})["loss"].mean().backward()
        optimizer.step()
        with torch.no_grad():
            by_hand.after_step(plain)
        for name, value in plain.state_dict().items():
            is_mean = name.startswith("query")
            average[name] = torch.lerp(average[name], value, 0.5) if is_mean else value.clone()
    torch.testing.assert_close(model.state_dict(), plain.state_dict())
    assert model.steps == 6
    with learner.ema.in_place_of_weights():
        torch.testing.assert_close(model.state_dict(), average)


def run(folder, arguments, env):
    words = [*ARGUMENTS, *arguments, "--results-dir", folder, "--json"]
    return tpukit(*words, env=env, ranks=ranks_of(arguments))


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference") / "run"
    result(run(folder, ["--hw", "cpu"], {}))
    return folder


@pytest.mark.parametrize("way", [pytest.param(way, marks=MARKS.get(way, ())) for way in WAYS])
def test_they_move_alike_however_a_step_is_cut(tmp_path, reference, way):
    arguments, env = WAYS[way]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    done = run(whole, arguments, env)
    assert result(done)["compilations_after_warmup"] == 0
    assert ("`after_step` is called once a step" in done.stderr) == ("--accumulate" in arguments)
    for file in ("model", "ema"):
        found, expected = parameters(whole, file), parameters(reference, file)
        # The ranks' keys stand in another order.
        for state in (found, expected):
            state["queue"] = state["queue"].sort(0).values
        assert found["steps"] == 6
        assert relative_difference(found, expected) < 1e-4
    argv = [*ARGUMENTS, *arguments, "--results-dir", killed]
    assert killed_sessions(tmp_path, [(argv, "step:4"), (argv, None)], env) == [9, 0]
    assert same_bytes(killed, whole)
