"""`--init-from`: a run's best weights begin another run, and nothing else of it does."""

import gc
import json
import re
import tomllib
from pathlib import Path

import pytest
import torch
from runs import TINY, VIRTUAL_TPU, failure, latest, parameters, result, same_bytes, tpukit
from safetensors.torch import save_file
from tiny_task import Tiny

import tpukit as package
from tpukit.errors import CheckpointError, ConfigError
from tpukit.train.weights import read_tensor

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


def test_a_tensor_is_read_in_pieces(tmp_path, monkeypatch):
    file = tmp_path / "weights.safetensors"
    shapes = [(), (0,), (0, 3), (3, 0), (1,), (5,), (7, 3), (1, 40), (4, 2, 3)]
    tensors = {str(s): torch.randn(s).to(torch.bfloat16) for s in shapes}
    save_file(tensors, file)
    monkeypatch.setattr("tpukit.train.weights.PIECE_NUMBERS", 8)
    for name, tensor in tensors.items():
        found = read_tensor(file, name, torch.float32)
        assert found.dtype == torch.float32 and torch.equal(found, tensor.float())


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no peak to read")
def test_a_read_tensor_is_in_memory_once(tmp_path):
    """And a piece of its file, whose pages count too while it is mapped."""
    save_file({"large": torch.ones(40, 2**20)}, tmp_path / "weights.safetensors")
    expected = 4 * 40 * 2**20

    def resident(field):
        return 1024 * int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[1])

    read_tensor(tmp_path / "weights.safetensors", "large", torch.float32)
    gc.collect()  # what is freed while the tensor is read would count against it
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    found = read_tensor(tmp_path / "weights.safetensors", "large", torch.float32)
    assert (
        expected <= resident("VmHWM") - before + 2**24
        and resident("VmHWM") - before < 1.6 * expected
    )
    assert found.sum() == found.numel()
