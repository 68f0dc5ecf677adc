"""Kernels are tried on a device before a run relies on them; what fails is not used."""

import dataclasses
import tomllib

import pytest
from runs import SUPPORT, environment, failure, parameters, script, tpukit

from tpukit.hardware import device_trials
from tpukit.hardware.detect import EMULATED_KERNELS, Hardware, TpuChips
from tpukit.hardware.device_trials import KERNELS, DeviceTrial, kernel_device
from tpukit.hardware.options import HardwareOptions
from tpukit.knowledge.accelerators import tpu_by_cloud_name

EMULATION = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1", EMULATED_KERNELS: "1"}
TASK = f"{SUPPORT / 'attention_task.py'}:Attending"
ARGUMENTS = ["train", "--task", TASK, "--hw", "tpu", "--precision", "fp32", "--max-steps", "1",
             "--global-batch-size", "4", "--accumulate", "1", "--set", "optimizer=sgd",
             "--lr", "0.1", "--steps", "traced"]  # fmt: skip


def train(folder, *more, cache=None, seconds=400, **variables):
    """The text of a run in `folder`, and what its config says of kernels."""
    path = f"{SUPPORT / 'broken_kernels'}:{environment().get('PYTHONPATH', '')}"
    own = {**EMULATION, "TPUKIT_CACHE_DIR": str(cache or folder / "cache"), "PYTHONPATH": path}
    limited = folder / "limited.py"
    limited.write_text(
        f"from tpukit.hardware import device_trials\ndevice_trials.TRIAL_SECONDS = {seconds}\n"
        "from tpukit.cli import main\nmain()\n"
    )
    words = [*ARGUMENTS, "--results-dir", folder / "run", *more]
    done = script(limited, *words, env={**own, **variables}, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    config = tomllib.loads((folder / "run" / "config.toml").read_text())
    return done.stdout, config["decided"]["kernels"]


@pytest.mark.jax
@pytest.mark.xla
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("differs", "attention: output differs by"),
        pytest.param("raises", "RuntimeError: Mosaic failed to compile", marks=pytest.mark.slow),
        pytest.param("hangs", "no answer within the time limit", marks=pytest.mark.slow),
    ],
)
def test_a_run_does_without_a_kernel_that_is_broken(tmp_path, how, said):
    text, kernels = train(tmp_path, BROKEN_KERNELS=how, seconds=60 if how == "hangs" else 400)
    [line] = [line for line in text.splitlines() if "without its kernels" in line]
    assert said in line
    assert kernels == "off"
    assert "Done: 1 steps" in text
    # On a busy machine the device may still be opening: that says nothing of the kernels.
    opened = "opening the device" not in line
    assert opened or how == "hangs"
    assert (tmp_path / "cache" / "kernels").exists() == opened


@pytest.mark.slow
@pytest.mark.jax
@pytest.mark.xla
def test_kernels_that_work_are_tried_once_and_compute_what_plain_attention_does(tmp_path):
    cache = tmp_path / "cache"
    weights = []
    ways = {"first": [], "second": [], "plain": ["--kernels", "off"], "broken": ["--kernels", "on"]}
    for name, more in ways.items():
        folder = tmp_path / name
        folder.mkdir()
        how = {"BROKEN_KERNELS": "differs" if name == "broken" else "not"}
        text, kernels = train(folder, *more, cache=cache, CPU_NUM_DEVICES="2", **how)
        assert ("Trying the attention kernels" in text) == (name == "first")
        assert kernels == ("off" if name == "plain" else "on")
        assert "without its kernels" not in text
        weights.append(parameters(folder / "run"))
    first, second, plain, broken = weights
    assert all(first[name].equal(second[name]) for name in first)
    assert all(first[name].allclose(plain[name], atol=1e-6) for name in first)
    # They are what computes: without a trial, a broken one is used.
    assert not all(broken[name].allclose(plain[name], atol=1e-6) for name in plain)


def test_kernels_are_refused_where_there_are_none(tmp_path):
    words = [*ARGUMENTS, "--results-dir", tmp_path / "run", "--kernels", "on"]
    said = failure(tpukit(*words, "--hw", "cpu", env={"TPUKIT_CACHE_DIR": str(tmp_path)}))
    assert "there are no kernels for this hardware" in said


def test_a_pod_host_tries_its_own_chips(monkeypatch):
    chips = TpuChips(tpu_by_cloud_name("v5e"), 4)
    hardware = Hardware("tpu", chips, (), 0, emulated=False)
    assert device_trials._environment(hardware) == {}
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "one,two")
    assert device_trials._environment(hardware)["TPU_CHIPS_PER_PROCESS_BOUNDS"] == "2,2,1"
    assert device_trials._environment(hardware)["TPU_VISIBLE_CHIPS"] == "0,1,2,3"


@pytest.mark.parametrize("kept", ["run", "programs"])
def test_a_result_outlives_the_session_that_found_it(tmp_path, monkeypatch, kept):
    """A notebook's home folder is new in each session; its runs and programs are attached."""
    hardware = Hardware("tpu", TpuChips(tpu_by_cloud_name("v5e"), 8), (), 0, emulated=False)
    tried, run, said = [], tmp_path / "run", []
    programs = str(tmp_path / "programs") if kept == "programs" else None
    options = HardwareOptions(hw="tpu", compile_cache=programs)
    device = kernel_device(hardware)

    def try_once(*_):
        tried.append(1)
        return {"works": True, "reason": "", "opened": True, "errors": {}}

    monkeypatch.setattr(DeviceTrial, "attempt", try_once)
    for session in ("first", "second"):
        monkeypatch.setenv("TPUKIT_CACHE_DIR", str(tmp_path / session))
        runs = [run] if kept == "run" else []
        assert KERNELS.works(device, hardware, options, said.append, runs=runs)
        # A new run's folder is made after its backend has opened.
        run.mkdir(exist_ok=True)
        KERNELS.keep(device, options, runs=runs)
    assert len(tried) == 1
    assert [path.name for path in (tmp_path / "first" / "kernels").iterdir()] == [
        path.name for path in (tmp_path / kept / "kernels").iterdir()
    ]


def test_a_process_that_holds_the_device_does_without(tmp_path, monkeypatch):
    monkeypatch.setenv("TPUKIT_CACHE_DIR", str(tmp_path))
    hardware = Hardware("tpu", TpuChips(tpu_by_cloud_name("v5e"), 8), (), 0, emulated=False)
    said = []
    options = HardwareOptions(hw="tpu")
    device = kernel_device(hardware)
    assert not KERNELS.works(device, hardware, options, said.append, may_try=False)
    assert len(said) == 1
    assert "this process holds it" in said[0]
    # Nothing is known of the kernels: the next process tries them.
    assert not (tmp_path / "kernels").exists()
    old = Hardware("tpu", TpuChips(tpu_by_cloud_name("v3"), 4), (), 0, emulated=False)
    assert kernel_device(old) is None
    assert kernel_device(dataclasses.replace(hardware, tpu=None)) is None
