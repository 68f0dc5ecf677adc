"""What a loss and its data draw is a function of seed, step and batch, whatever else happens."""

import pytest
import torch
from runs import (
    SUPPORT,
    VIRTUAL_TPU,
    metrics,
    parameters,
    ranks_of,
    relative_difference,
    result,
    tpukit,
)

DRAWING = ["--task", f"{SUPPORT / 'drawing_task.py'}:Drawing"]
WAYS = {
    "cpu": (["--hw", "cpu"], {}),
    "two-ranks": (["--hw", "cpu", "--devices", "2"], {}),
    "xla-4": (["--hw", "tpu"], {**VIRTUAL_TPU, "CPU_NUM_DEVICES": "4"}),
    "gpu": (["--hw", "gpu", "--devices", "1"], {}),
}
ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MARKED = [
    pytest.param(
        way,
        marks={
            "two-ranks": [pytest.mark.slow],
            "xla-4": [pytest.mark.xla, pytest.mark.slow],
            "gpu": ON_GPU,
        }.get(way, []),
    )
    for way in WAYS
]


def train(folder, way, *arguments):
    """The rows of metrics.jsonl, of training and of validation."""
    given, env = WAYS[way]
    exactly = ["--precision", "fp32", *["--deterministic"] * (way == "gpu")]
    words = ["train", *DRAWING, *given, *arguments, *exactly, "--results-dir", folder]
    result(tpukit(*words, "--json", env=env, ranks=ranks_of(given)))
    rows = metrics(folder)
    return [[row for row in rows if row["kind"] == kind] for kind in ("train", "valid")]


def losses(rows):
    return {row["step"]: (row["loss"], row["device"]) for row in rows}


@pytest.mark.parametrize("way", MARKED)
def test_validation_and_logs_leave_the_curve_alone_and_test_finds_its_numbers(tmp_path, way):
    rare, _ = train(tmp_path / "rare", way, "--log-every", "1", "--ckpt-every", "8")
    often, valid = train(tmp_path / "often", way, "--log-every", "1", "--ckpt-every", "2")
    assert losses(rare) == losses(often) and len(rare) == 8
    if way == "cpu":
        seldom, _ = train(tmp_path / "seldom", way, "--log-every", "4", "--ckpt-every", "3")
        means = [sum(row["loss"] for row in rare[i : i + 4]) / 4 for i in (0, 4)]
        assert [row["loss"] for row in seldom] == pytest.approx(means, rel=1e-6)

    given, env = WAYS[way]
    last = sorted((tmp_path / "often" / "checkpoints").glob("step-*"))[-1]
    words = ["test", "--run", last, *given, "--precision", "fp32", "--json"]
    ranks = ranks_of(given)
    found = [result(tpukit(*words, env=env, ranks=ranks))["metrics"] for _ in range(2)]
    assert found[0] == found[1]
    printed = {f"valid_{name}": value for name, value in found[0].items()}
    assert printed == pytest.approx({n: valid[-1][n] for n in printed}, rel=1e-5)
    other = result(tpukit(*words, "--seed", "1", env=env, ranks=ranks))["metrics"]
    assert other["device"] != found[0]["device"] and other["host"] != found[0]["host"]


@pytest.mark.parametrize("way", MARKED[2:])
def test_a_stream_and_the_loss_beside_it_draw_on_a_device_what_they_draw_on_a_cpu(tmp_path, way):
    """The thread that sends batches must not draw beside the one that trains."""
    arguments = ["--set", "stream=true", "--max-steps", "60", "--log-every", "1"]
    runs = [
        train(tmp_path / str(i), each, *arguments)[0] for i, each in enumerate(("cpu", way, way))
    ]
    noise, host = ([[row[name] for row in run] for run in runs] for name in ("noise", "host"))
    assert noise[1] == noise[2] and host[1] == host[2]
    assert noise[1] == pytest.approx(noise[0], rel=1e-5) and len({*noise[0]}) == 60
    assert host[1] == pytest.approx(host[0], rel=1e-5) and len({*host[0]}) == 60


def test_replicas_draw_alike_in_a_step_and_test_draws_the_model_of_the_run(tmp_path):
    run, hardware = tmp_path / "run", WAYS["two-ranks"][0]
    task = ["--task", f"{SUPPORT / 'drawing_task.py'}:Redrawing"]
    words = ["train", *task, *hardware, "--precision", "fp32", "--global-seed", "3"]
    result(tpukit(*words, "--results-dir", run, "--json", ranks=2))
    found = result(tpukit("test", "--run", run, "--hw", "cpu", "--json"))["metrics"]["loss"]
    best = min(row["valid_loss"] for row in metrics(run) if row["kind"] == "valid")
    assert found == pytest.approx(best, rel=1e-5)


def test_what_a_validation_moves_in_the_model_is_put_back(tmp_path):
    task = ["--task", f"{SUPPORT / 'drawing_task.py'}:Observing"]
    often, once = tmp_path / "often", tmp_path / "once"
    ema = ["--set", "ema_decay=0.5", "--set", "ema_warmup=0"]
    for run, every in ((often, ["--ckpt-every", "2"]), (once, ["--ckpt-every", "8", *ema])):
        words = ["train", *task, *WAYS["cpu"][0], *every, "--results-dir", run]
        result(tpukit(*words, "--json"))
    assert relative_difference(parameters(often), parameters(once)) == 0
    found = result(tpukit("test", "--run", once, "--hw", "cpu", "--json"))["metrics"]
    [valid] = [row for row in metrics(once) if row["kind"] == "valid"]
    assert found["loss"] == pytest.approx(valid["valid_loss"], rel=1e-6)
