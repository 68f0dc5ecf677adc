"""Runs whose steps are recorded end in the bytes of those whose steps are traced."""

import pytest
from runs import (
    SUPPORT,
    VIRTUAL_TPU,
    killed_sessions,
    last_json,
    result,
    same_bytes,
    script,
    tpukit,
)

from tests.own_tasks.test_own_tasks import TASKS, folder, task_options  # noqa: F401
from tpukit.probe.parity import UNOPTIMIZED

pytestmark = [pytest.mark.xla, pytest.mark.slow]
XLA = {**VIRTUAL_TPU, "CPU_NUM_DEVICES": "2"}
ZOO = [
    "timm-resnet", "timm-vision_transformer", "timm-convnext", "timm-efficientnet",
    "timm-swin_transformer", "timm-mobilenetv3", "transformers-llama", "transformers-gpt2",
    "transformers-bert", "transformers-t5", "transformers-clip", "torchvision-resnet",
]  # fmt: skip


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ZOO)
def test_models_of_others_take_the_traced_steps(name):
    env = {**VIRTUAL_TPU, "CPU_NUM_DEVICES": "2", "XLA_FLAGS": UNOPTIMIZED}
    found = last_json(script("recorded_steps.py", "zoo", name, "12", env=env, timeout=1700))
    assert found["differing"] == []
    # One more is recorded where the first filled a cache, as BERT's does.
    assert found["executed"] >= 9 and found["said"] == []


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [name for name in TASKS if name != "detection"])
def test_own_tasks_take_the_traced_steps(name, folder, tmp_path):  # noqa: F811
    words = ["train", *task_options(name, folder), "--hw", "tpu", "--max-steps", "12", "--json",
             "--ckpt-every", "4", "--precision", "fp32", "--set", "ema_decay=0.9"]  # fmt: skip
    for steps in ("traced", "recorded"):
        run = ["--steps", steps, "--results-dir", tmp_path / steps]
        result(tpukit(*words, *run, env=XLA, timeout=900))
    assert same_bytes(tmp_path / "traced", tmp_path / "recorded")


@pytest.mark.timeout(1800)
def test_a_run_goes_on_with_steps_of_the_other_kind(tmp_path):
    """Killed while it records, resumed traced, killed, and resumed recorded."""
    words = ["train", "--task", f"{SUPPORT / 'tiny_task.py'}:Tiny", "--max-steps", "24",
             "--ckpt-every", "2", "--set", "dropout=0.2", "--num-workers", "1", "--hw", "tpu",
             "--accumulate", "2"]  # fmt: skip
    runs = {name: [*words, "--results-dir", tmp_path / name] for name in ("whole", "mixed")}
    sessions = [([*runs["mixed"], "--steps", steps], at) for steps, at in
                (("recorded", "step:9"), ("traced", "step:7"), ("recorded", None))]  # fmt: skip
    whole = ([*runs["whole"], "--steps", "traced"], None)
    assert killed_sessions(tmp_path, [*sessions, whole], XLA) == [9, 9, 0, 0]
    assert same_bytes(tmp_path / "mixed", tmp_path / "whole")
