"""`--init-from`: a run's best weights begin another run, and nothing else of it does."""

import json
import tomllib

import pytest
import torch
from runs import TINY, VIRTUAL_TPU, failure, latest, parameters, result, same_bytes, tpukit
from tiny_task import Tiny

import tpukit as package
from tpukit.errors import CheckpointError, ConfigError

BASE = ["train", "--task", TINY, "--hw", "cpu", "--json"]
STILL = ["--lr", "0", "--max-steps", "2", "--set", "clip_norm=0"]
"""A run that leaves its initial weights as they are."""
HARDWARE = {
    "cpu": ([], {}),
    "two-ranks": (["--devices", "2"], {}),
    "xla": (["--hw", "tpu"], {**VIRTUAL_TPU, "CPU_NUM_DEVICES": "2"}),
}
MARKS = {"two-ranks": [pytest.mark.slow], "xla": [pytest.mark.slow, pytest.mark.xla]}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with EMA weights, which are the best ones."""
    run = tmp_path_factory.mktemp("trained") / "run"
    result(tpukit(*BASE, "--max-steps", "10", "--ckpt-every", "5", "--results-dir", run))
    return run


def is_best_of(weights, run):
    best = package.load(run, log=lambda line: None).weights()
    assert not all(torch.equal(best[n], parameters(run)[n]) for n in best), "it has EMA weights"
    return all(torch.equal(weights[name], best[name]) for name in best)


@pytest.mark.parametrize("way", [pytest.param(w, marks=MARKS.get(w, ())) for w in HARDWARE])
def test_a_run_begins_with_the_best_weights_and_anew(trained, tmp_path, way):
    hardware, env = HARDWARE[way]
    run = tmp_path / "run"
    arguments = [*BASE, *STILL, *hardware, "--init-from", trained, "--results-dir", run]
    printed = tpukit(*arguments, "--global-batch-size", "8", env=env)
    assert f"Initial weights: {trained}, step-00000010" in printed.stderr
    done = result(printed)
    assert (done["steps"], done["resumed_from"]) == (2, None)
    assert is_best_of(parameters(run), trained) and is_best_of(parameters(run, "ema"), trained)
    state = json.loads((latest(run) / "state.json").read_text())
    assert state["step"] == 2 and state["identity"]["global_batch_size"] == 8
    assert tomllib.loads((run / "config.toml").read_text())["train"]["init_from"] == str(trained)


def test_a_resumed_run_goes_on_with_its_own_weights(trained, tmp_path):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    start = [*BASE, "--init-from", trained]
    for run, steps in ((whole, 6), (stopped, 3), (stopped, 6)):
        done = tpukit(*start, "--max-steps", steps, "--results-dir", run)
        result(done)
    assert f"{stopped} is resumed: --init-from is not used" in done.stderr
    assert same_bytes(whole, stopped)


def test_a_checkpoint_and_what_fit_returned_are_taken_too(trained, tmp_path):
    options = {"hw": "cpu", "lr": 0.0, "max_steps": 1, "log": lambda line: None}
    first = package.fit(Tiny, init_from=trained, results_dir=tmp_path / "one", **options)
    assert is_best_of(parameters(tmp_path / "one"), trained)
    package.fit(Tiny(), init_from=first, results_dir=tmp_path / "two", **options)
    assert is_best_of(parameters(tmp_path / "two"), trained)
    checkpoint = sorted((trained / "checkpoints").glob("step-*"))[0]
    package.fit(Tiny, init_from=checkpoint, results_dir=tmp_path / "three", **options)
    assert parameters(tmp_path / "three").keys() == parameters(trained).keys()
    assert not is_best_of(parameters(tmp_path / "three"), trained)


class Other(Tiny):
    name = "other"


@pytest.mark.parametrize(
    ("task", "options", "says"),
    [
        (Tiny, {"init_from": "nowhere"}, "--init-from: Run folder nowhere does not exist"),
        (Other, {}, "is a run of task 'tiny', not 'other'"),
        (
            Tiny,
            {"width": 16},
            r"has 0.bias of shape \(32,\), not \(16,\), 0.weight .* \(5 differences\).\nGive the",
        ),
    ],
)
def test_what_does_not_fit_is_listed(trained, tmp_path, task, options, says):
    run = tmp_path / "run"
    with pytest.raises(CheckpointError, match=says):
        package.fit(task, hw="cpu", results_dir=run, **{"init_from": trained, **options})
    assert not run.exists()


def test_its_own_folder_is_refused(trained):
    for source in (trained, latest(trained)):
        with pytest.raises(ConfigError, match="in the folder of the new run itself"):
            package.fit(Tiny, hw="cpu", results_dir=trained, resume=False, init_from=source)
    assert latest(trained).name == "step-00000010"


def test_other_settings_are_refused_with_this_way_on(trained):
    told = failure(tpukit(*BASE[:-1], "--max-steps", "12", "--lr", "1", "--results-dir", trained))
    assert "lr was 0.001, now 1.0" in told and f"--init-from {trained}" in told
