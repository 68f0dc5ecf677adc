"""The tasks of docs/own_task.md: trained, resumed to the same bytes, evaluated, used, compiled."""

import re
from pathlib import Path

import numpy as np
import pytest
from runs import (
    SUPPORT,
    VIRTUAL_TPU,
    latest,
    parameters,
    ranks_of,
    relative_difference,
    result,
    tpukit,
)

import tpukit as package

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "tasks"
CPU = (["--hw", "cpu"], {})
TWO_RANKS = (["--hw", "cpu", "--devices", "2"], {})
XLA = (["--hw", "tpu"], {**VIRTUAL_TPU, "CPU_NUM_DEVICES": "2"})
WAYS = {"cpu": CPU, "two-ranks": TWO_RANKS, "xla": XLA}


PUBLIC = re.compile(r"^ *from (tpukit[.\w]*) import ([^(\n]+|\([^)]+\))", re.MULTILINE)


@pytest.mark.parametrize(
    "page",
    [*sorted(DOCS.parent.rglob("*.py")), *sorted(DOCS.parent.glob("*.md")),
     ROOT / "README.md", ROOT / "notebooks" / "cells.md"],
    ids=lambda page: page.name,
)  # fmt: skip
def test_examples_import_public_names(page):
    for module, names in PUBLIC.findall(page.read_text(encoding="utf-8")):
        public = {"tpukit": package.__all__, "tpukit.testing": ["trains_on_tpu"]}
        assert module in public, f"{page.name} imports from {module}"
        assert {name.strip() for name in names.strip("()").split(",")} - {""} <= {*public[module]}


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    """A book, prompts and drawings."""
    folder = tmp_path_factory.mktemp("material")
    rng = np.random.default_rng(0)
    for part in ("train", "valid"):
        np.save(folder / f"{part}.npy", rng.integers(0, 255, (24, 8, 8), dtype=np.uint8))
    (folder / "book.txt").write_text("A good day is a very good day. " * 40)
    (folder / "prompts.txt").write_text("A good\nA very good\nA\n")
    return folder


def settings(task, folder):
    """The task, its data and small sizes; what it predicts from."""
    if task == "llama":
        sizes = ["--set", "width=16", "--set", "length=32", "--set", "written=8"]
        return "llama.py:Llama", folder / "book.txt", sizes, folder / "prompts.txt"
    sizes = ["--set", "width=8", "--set", "side=8", "--set", "count=3", "--set", "steps=3"]
    return "unet.py:Drawings", folder, sizes, None


def train(task, folder, run, steps, way, more=()):
    name, data, sizes, _ = settings(task, folder)
    hardware, env = way
    return result(
        tpukit(
            "train", "--task", f"{DOCS / name}", "--data-path", data, *sizes, *hardware, *more,
            "--global-batch-size", "8", "--accumulate", "2", "--max-steps", str(steps),
            "--set", "schedule=constant", "--set", "warmup_steps=0",
            "--results-dir", run, "--json", env=env, timeout=600, ranks=ranks_of(hardware),
        )
    )  # fmt: skip


def use(command, task, folder, run, way, *more):
    """The JSON fields of `test` or `predict`."""
    hardware, env = way
    return result(tpukit(command, "--run", run, *hardware, "--json", *more, env=env, timeout=900))


def check_written(task, folder, run, way, out):
    source = settings(task, folder)[3]
    path = [] if source is None else ["--data-path", source]
    fields = use("predict", task, folder, run, way, *path, "--out", out)
    assert fields["rows"] == {"llama": 3, "drawings": 3}[task]
    if task == "llama":
        written = out.read_bytes()
        assert written.startswith(b"A good") and len(written) == 3 * 8 + len(
            "A goodA very goodA\n\n\n"
        )
    else:
        assert np.load(out).shape == (3, 8, 8)


def check(task, folder, tmp_path, way, more=()):
    """A run, the same run stopped and resumed, and what it is for."""
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    train(task, folder, whole, 4, way, more)
    train(task, folder, stopped, 2, way, more)
    assert train(task, folder, stopped, 4, way, more)["resumed_from"] == 2
    files = ("model.safetensors", "optimizer.safetensors")
    assert all(
        (latest(whole) / f).read_bytes() == (latest(stopped) / f).read_bytes() for f in files
    )
    fields = use("test", task, folder, whole, way)
    assert fields["samples"] == {"llama": 3, "drawings": 24}[task]
    assert fields["metrics"]["loss"] > 0
    check_written(task, folder, whole, way, tmp_path / "out.npy")


def test_a_unet_on_the_cpu(material, tmp_path):
    check("drawings", material, tmp_path, CPU)


SLOW = [("llama", "two-ranks"), ("llama", "xla"), ("drawings", "xla")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "way"),
    [pytest.param(t, w, marks=pytest.mark.xla if w == "xla" else ()) for t, w in SLOW],
)
def test_each_task_everywhere(task, way, material, tmp_path):
    check(task, material, tmp_path, WAYS[way])


@pytest.mark.slow
@pytest.mark.xla
def test_a_unet_with_batch_norm(material, tmp_path):
    check("drawings", material, tmp_path, XLA, ["--set", "norm=batch"])


@pytest.mark.slow
@pytest.mark.plan
@pytest.mark.parametrize("task", ["llama", "drawings"])
def test_each_compiles_for_a_tpu(task, material):
    name, data, sizes, _ = settings(task, material)
    limits = ["--start", "8", "--max", "8", "--target", "v5e-1", "--json"]
    done = tpukit("probe-batch", "--task", DOCS / name, "--data-path", data, *sizes, *limits)
    assert result(done)["largest_batch_per_device"] == 8


@pytest.mark.slow
@pytest.mark.xla
def test_a_loss_over_the_whole_batch_is_the_same_everywhere(tmp_path):
    """On one rank, on two that gather each other's rows, and on two devices of one process."""
    done, task = {}, f"{SUPPORT / 'contrastive_task.py'}:Contrastive"
    for name, (hardware, env) in WAYS.items():
        run = ["--precision", "fp32", "--results-dir", tmp_path / name, "--json"]
        done[name] = result(tpukit("train", "--task", task, *hardware, *run, env=env))
    assert done["two-ranks"]["loss"] == pytest.approx(done["cpu"]["loss"], rel=1e-5)
    assert done["xla"]["best"]["loss"] == pytest.approx(done["cpu"]["best"]["loss"], rel=1e-4)
    weights = {name: parameters(tmp_path / name) for name in WAYS}
    assert relative_difference(weights["two-ranks"], weights["cpu"]) < 1e-5
    assert relative_difference(weights["xla"], weights["cpu"]) < 1e-4
