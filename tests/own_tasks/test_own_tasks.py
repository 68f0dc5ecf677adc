"""Thirteen tasks written as public scripts are, used by every command as a new user would."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import VIRTUAL_TPU, ranks_of, result, same_bytes, tpukit

import tpukit as package
from tpukit.train.task import VALIDATION_EPOCH, sample_rng, stack_samples

HERE = Path(__file__).parent
TASKS = {
    "arcface": "ArcFace", "tokens": "Tagger", "t5": "Reverse", "ctc": "Speech",
    "unet3d": "Segment", "graphs": "Molecules", "table": "Table", "simclr": "SimClr",
    "vqvae": "Codebook", "detection": "Boxes", "distill": "Distill", "lora": "Counting",
    "shards": "Streamed",
}  # fmt: skip
"""File -> class."""
SEES_ITS_RANK = ("simclr", "arcface", "distill", "detection", "table", "vqvae")
"""Tasks whose BatchNorm, contrast or sampled anchors see a rank's own rows."""
CPU = (["--hw", "cpu"], {})
RANKS = (["--hw", "cpu", "--devices", "2"], {})
XLA = (["--hw", "tpu"], {**VIRTUAL_TPU, "CPU_NUM_DEVICES": "2"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    sys.path.insert(0, str(HERE))
    from shards import write_shards

    path = tmp_path_factory.mktemp("own")
    write_shards(path / "shards")
    yield path
    sys.path.remove(str(HERE))


def task_options(name, folder):
    data = ["--data-path", folder / "shards"] if name == "shards" else []
    return ["--task", f"{HERE / name}.py:{TASKS[name]}", *data]


def train(name, folder, run, steps, way, *more):
    hardware, env = way
    return result(
        tpukit(
            "train", *task_options(name, folder), *hardware, "--max-steps", steps, "--ckpt-every",
            2, "--results-dir", run, "--precision", "fp32", "--set", "ema_decay=0.9",
            "--json", *more, env=env, timeout=600, ranks=ranks_of(hardware),
        )
    )  # fmt: skip


def validation_loss(run):
    """The mean over samples, each by itself, with plain torch."""
    opened = package.load(run)
    task = opened.task
    total = weights = 0.0
    valid = task.datasets().valid
    for index in range(len(valid)):
        drawn = task.draw(valid[index], sample_rng(0, VALIDATION_EPOCH, index))
        if type(task).collate is package.Task.collate:
            batch = stack_samples([drawn], 1)
        else:
            batch = {**task.collate([drawn], None), "mask": torch.ones(1)}
        with torch.no_grad():
            found = task.loss(opened.model, batch)
        weight = float(found.get("weight", torch.ones(1)).sum())
        total += float(found["loss"].mean()) * weight
        weights += weight
    return total / weights


@pytest.mark.slow
@pytest.mark.parametrize("name", list(TASKS))
def test_trained_resumed_tested_and_used_on_a_cpu(name, folder, tmp_path):
    train(name, folder, tmp_path / "whole", 4, CPU)
    train(name, folder, tmp_path / "run", 2, CPU)
    assert train(name, folder, tmp_path / "run", 4, CPU)["resumed_from"] == 2
    assert same_bytes(tmp_path / "whole", tmp_path / "run")
    tested = result(tpukit("test", "--run", tmp_path / "run", *CPU[0], "--json"))
    if name not in ("simclr", "detection"):  # their losses are those of a whole batch
        expected = validation_loss(tmp_path / "run")
        assert tested["metrics"]["loss"] == pytest.approx(expected, rel=1e-4)
    out = tmp_path / "predictions.txt"
    used = result(tpukit("predict", "--run", tmp_path / "run", "--out", out, *CPU[0], "--json"))
    assert len(np.loadtxt(out, ndmin=2)) == used["rows"] == tested["samples"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TASKS if name not in SEES_ITS_RANK])
def test_two_ranks_learn_what_one_does(name, folder, tmp_path):
    one = train(name, folder, tmp_path / "one", 3, CPU, "--log-every", "1")
    two = train(name, folder, tmp_path / "two", 3, RANKS, "--log-every", "1")
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-3)


@pytest.mark.slow
@pytest.mark.xla
@pytest.mark.parametrize("name", [name for name in TASKS if name != "detection"])
def test_virtual_devices_learn_what_a_cpu_does(name, folder, tmp_path):
    cpu = train(name, folder, tmp_path / "cpu", 3, CPU, "--log-every", "1")
    xla = train(name, folder, tmp_path / "xla", 3, XLA, "--log-every", "1")
    if name != "ctc":  # its loss leaves the device
        assert xla["compilations_after_warmup"] == 0
    # Dropout draws from the device's generator.
    assert xla["loss"] == pytest.approx(cpu["loss"], rel=0.1 if name == "table" else 1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5", "detection", "shards"])
def test_the_batch_search_measures_it(name, folder):
    found = result(
        tpukit(
            "probe-batch", *task_options(name, folder), "--hw", "cpu", "--start", 2, "--max", 8,
            "--json", timeout=600,
        )
    )  # fmt: skip
    assert found["largest_batch_per_device"] == 8 and all(t["fits"] for t in found["trials"])
