"""What a training run leaves, how it stops, how it goes on: through the command line."""

import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from runs import (
    TINY,
    VIRTUAL_TPU,
    failure,
    latest,
    metrics,
    parameters,
    relative_difference,
    result,
    same_bytes,
    started,
    tpukit,
    wait_until,
)

BASE = ["train", "--task", TINY, "--hw", "cpu", "--log-every", "5", "--ckpt-every", "10"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run of 40 steps, and what it printed."""
    run = tmp_path_factory.mktemp("whole") / "run"
    summary = result(tpukit(*BASE, "--max-steps", "40", "--results-dir", run, "--json"))
    return run, summary


def test_the_run_folder_holds_everything(whole):
    run, summary = whole
    assert summary["steps"] == 40 and summary["run"] == str(run) and summary["finished"]
    assert latest(run).name == "step-00000040"
    assert {f.name for f in latest(run).iterdir()} == {
        "model.safetensors", "extra_state.pt", "ema.safetensors", "optimizer.safetensors",
        "state.json", "note.txt",
    }  # fmt: skip
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list(run.glob("events.out.tfevents.*"))
    config = (run / "config.toml").read_text()
    assert all(part in config for part in ('name = "tiny"', "lr = 0.001", "[versions]", "torch = "))
    assert "began" in (run / "logs" / "rank-0.txt").read_text()
    assert "Done: 40 steps" in (run / "log.txt").read_text()


def test_without_a_compiler_training_goes_on_uncompiled(tmp_path):
    arguments = (*BASE, "--compile", "--max-steps", "2", "--results-dir", tmp_path / "run")
    done = tpukit(*arguments, "--json", env={"CXX": "no-such-compiler"})
    assert result(done)["compilations"] == 0
    warnings = [line for line in done.stderr.splitlines() if "C++ compiler" in line]
    assert len(warnings) == 1 and "no-such-compiler" in warnings[0]


def test_the_log_tells_what_a_user_watches(whole):
    rows = metrics(whole[0])
    train = [row for row in rows if row["kind"] == "train"]
    assert [row["step"] for row in train] == list(range(5, 41, 5))
    for field in ("loss", "worst", "lr", "gradient_norm", "samples_per_second", "compilations"):
        assert all(field in row for row in train), field
    valid = [row["valid_loss"] for row in rows if row["kind"] == "valid"]
    assert len(valid) == 4 and valid[-1] < valid[0], "the small network must learn"
    assert whole[1]["best"]["loss"] == min(valid)


def test_tensorboard_has_the_same_figures(whole):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(whole[0]))
    events.Reload()
    told = {row["step"]: row["loss"] for row in metrics(whole[0]) if row["kind"] == "train"}
    assert {e.step: e.value for e in events.Scalars("loss")} == pytest.approx(told, rel=1e-6)


def test_a_finished_run_says_so(whole):
    done = tpukit(*BASE, "--max-steps", "40", "--results-dir", whole[0])
    assert done.returncode == 0 and "is finished (40 steps)" in done.stdout


@pytest.mark.parametrize(
    ("number", "code", "devices"),
    [
        (signal.SIGINT, 130, "1"),
        pytest.param(signal.SIGTERM, 143, "2", marks=pytest.mark.slow),
    ],
)
def test_a_signal_writes_a_checkpoint_and_tells_how_to_go_on(
    tmp_path, whole, number, code, devices
):
    run = tmp_path / "run"
    arguments = [*BASE, "--max-steps", "40", "--results-dir", str(run), "--devices", devices]
    with started(*arguments, "--set", "pause=0.2") as process:
        log = run / "log.txt"
        wait_until(lambda: log.exists() and "step" in log.read_text(), process)
        time.sleep(1)
        process.send_signal(number)
        status = process.wait(60)
        told = process.stderr.read()
    assert status == code, told
    assert "the checkpoint is written" in told and "tpukit train" in told
    assert "Traceback" not in told
    stopped = int(latest(run).name.removeprefix("step-"))
    assert 0 < stopped < 40
    summary = result(tpukit(*arguments, "--json"))
    assert summary["resumed_from"] == stopped
    if devices == "1":
        assert same_bytes(run, whole[0])


def test_max_time_stops_in_time_and_the_run_goes_on(tmp_path, whole):
    run = tmp_path / "run"
    arguments = [*BASE, "--max-steps", "40", "--results-dir", run, "--json"]
    first = result(tpukit(*arguments, "--max-time", "2s", "--set", "pause=0.3"))
    assert not first["finished"] and 0 < first["steps"] < 40
    assert result(tpukit(*arguments))["resumed_from"] == first["steps"]
    assert same_bytes(run, whole[0])


def test_what_goes_on_with_a_run_sets_what_decided_its_hardware(tmp_path):
    chosen = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2", "CUDA_VISIBLE_DEVICES": ""}
    run = tmp_path / "run"
    arguments = [*BASE, "--max-time", "1s", "--set", "pause=0.3", "--results-dir", run]
    done = tpukit(*arguments, env=chosen)
    command = f"PJRT_DEVICE=CPU CPU_NUM_DEVICES=2 CUDA_VISIBLE_DEVICES= tpukit train --task {TINY}"
    assert f"Go on with: {command}" in done.stdout
    assert f"Command: {command}" in (run / "log.txt").read_text().splitlines()[0]


def test_resume_from_a_read_only_run(tmp_path, whole):
    source = tmp_path / "input"
    half = result(tpukit(*BASE, "--max-steps", "20", "--results-dir", source, "--json"))
    before = sorted((f, f.stat().st_mtime_ns) for f in source.rglob("*"))
    arguments = [*BASE, "--max-steps", "40", "--results-dir", tmp_path / "run", "--json"]
    summary = result(tpukit(*arguments, "--resume-from", source))
    assert summary["resumed_from"] == half["steps"] == 20
    assert same_bytes(tmp_path / "run", whole[0])
    assert sorted((f, f.stat().st_mtime_ns) for f in source.rglob("*")) == before


def test_no_resume_sets_the_old_run_aside(tmp_path, whole):
    run = tmp_path / "run"
    shutil.copytree(whole[0], run)
    arguments = [*BASE, "--max-steps", "4", "--results-dir", run, "--no-resume", "--json"]
    summary = result(tpukit(*arguments))
    assert summary["steps"] == 4 and summary["resumed_from"] is None
    assert same_bytes(tmp_path / "run.old-1", whole[0])


def test_a_damaged_newest_checkpoint_falls_back_and_says_so(tmp_path, whole):
    run = tmp_path / "run"
    shutil.copytree(whole[0], run)
    weights = latest(run) / "optimizer.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    done = tpukit(*BASE, "--max-steps", "40", "--results-dir", run)
    assert done.returncode == 0, done.stderr
    assert "step-00000040" in done.stdout and "damaged" in done.stdout
    assert "step-00000030" in done.stdout
    assert same_bytes(run, whole[0])


def test_files_that_others_leave_in_a_run_change_nothing(tmp_path, whole):
    """Jupyter's and the Finder's, and a copy that somebody made of a checkpoint."""
    run = tmp_path / "run"
    shutil.copytree(whole[0], run)
    for folder in (latest(run), run / "logs", run / "checkpoints"):
        (folder / ".ipynb_checkpoints").mkdir()
        (folder / ".DS_Store").write_bytes(b"Finder")
    shutil.copytree(latest(run), run / "checkpoints" / "step-00000041-copy")
    again = tpukit(*BASE, "--max-steps", "40", "--results-dir", run)
    assert "is finished" in again.stdout and "Skipping" not in again.stdout, again.stderr
    tested = result(tpukit("test", "--run", run, "--hw", "cpu", "--json"))
    assert tested["metrics"]["loss"] > 0
    copied = tmp_path / "copied"
    further = tpukit(*BASE, "--max-steps", "40", "--results-dir", copied, "--resume-from", run)
    assert further.returncode == 0, further.stderr
    assert {f.name for f in latest(copied).iterdir()} >= {"state.json", "note.txt"}


def test_a_non_finite_loss_is_named_and_no_checkpoint_follows(tmp_path):
    run = tmp_path / "run"
    arguments = [*BASE, "--max-steps", "40", "--results-dir", run, "--set", "bad=17"]
    told = failure(tpukit(*arguments, "--ckpt-every", "1"), code=1)
    assert "'y' of training sample 17 holds inf" in told
    bad = int(told.split("in step ")[1].split(";")[0])
    assert 1 <= bad <= 4, "each pass of four steps meets the sample once"
    steps = [int(p.name.removeprefix("step-")) for p in (run / "checkpoints").glob("step-*")]
    assert max(steps, default=0) == bad - 1


def test_decoupled_decay_and_clipping_equal_plain_torch(tmp_path):
    """Ten steps against a loop written out with torch's own AdamW and clipping."""
    sys.path.insert(0, str(Path(TINY.split(":")[0]).parent))
    from tiny_task import Tiny

    from tpukit.train.learner import seed_everything
    from tpukit.train.task import PlanSettings, sample_rng

    run = tmp_path / "run"
    arguments = [*BASE, "--max-steps", "10", "--set", "clip_norm=0.05", "--results-dir", run]
    result(tpukit(*arguments, "--json"))
    task = Tiny()
    seed_everything(0)
    model = task.build_model(None)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}], lr=1e-3
    )
    data = task.datasets().train
    plan = task.plan(data, PlanSettings(16, 16, 1, 0))
    for step in range(10):
        micro = plan.step(step)[0]
        draws = [task.draw(data[k.sample], sample_rng(0, k.epoch, k.sample)) for k in micro.keys]
        optimizer.zero_grad()
        task.loss(model, task.collate(draws, micro))["loss"].mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    assert relative_difference(parameters(run), dict(model.named_parameters())) < 1e-5


def test_a_profile_of_a_few_steps(tmp_path):
    run = tmp_path / "run"
    done = tpukit(*BASE, "--max-steps", "10", "--results-dir", run, "--profile")
    assert done.returncode == 0, done.stderr
    assert any(f.stat().st_size for f in (run / "profile").rglob("*") if f.is_file())


@pytest.mark.slow
@pytest.mark.xla
def test_a_run_moves_from_virtual_tpu_to_cpu(tmp_path, whole):
    run = tmp_path / "run"
    arguments = [*BASE, "--precision", "fp32", "--results-dir", run, "--json"]
    result(tpukit(*arguments, "--max-steps", "20", "--hw", "tpu", env=VIRTUAL_TPU))
    summary = result(tpukit(*arguments, "--max-steps", "40", "--hw", "cpu"))
    assert summary["resumed_from"] == 20
    assert relative_difference(parameters(run), parameters(whole[0])) < 1e-4


def test_a_failed_resume_from_leaves_nothing_and_a_finished_one_a_run(tmp_path):
    source, target = tmp_path / "input", tmp_path / "run"
    arguments = [*BASE, "--max-steps", "20", "--set", "schedule=cosine"]
    result(tpukit(*arguments, "--results-dir", source, "--json"))
    again = [*BASE, "--set", "schedule=cosine", "--results-dir", target, "--resume-from", source]
    told = failure(tpukit(*again, "--max-steps", "30"))
    assert "--max-steps 20 finishes it" in told and "schedule=constant" in told
    assert not target.exists()
    done = tpukit(*again, "--max-steps", "20")
    assert "is finished (20 steps)" in done.stdout
    assert result(tpukit("test", "--run", target, "--json"))["task"] == "tiny"
