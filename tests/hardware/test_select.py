"""Which hardware is selected, on recorded machines: without torch, and without silent fallbacks."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from recorded_host import RecordedHost

from tpukit.errors import HardwareError
from tpukit.hardware import select, tpu_stack
from tpukit.hardware.detect import TPU_VARIABLES
from tpukit.hardware.options import HardwareOptions, choose_precision
from tpukit.hardware.select import find_kind, prepare_environment, rank_count

STEERING = ("PJRT_DEVICE", "CPU_NUM_DEVICES", "CUDA_VISIBLE_DEVICES", "TPU_PROCESS_ADDRESSES",
            "TPU_VISIBLE_CHIPS", "TPU_CHIPS_PER_PROCESS_BOUNDS", "TPU_PROCESS_BOUNDS",
            "USE_TORCH_XLA", "PYTORCH_CUDA_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG",
            "TF_CPP_MIN_LOG_LEVEL", "TORCH_DEVICE_BACKEND_AUTOLOAD", *TPU_VARIABLES)  # fmt: skip


def files_of(chips=0, gpus=0, pci_device="0x0063"):
    """The files by which a machine with these TPU chips and GPUs is recognised."""
    files = {}
    for chip in range(chips):
        folder = f"/sys/bus/pci/devices/0000:00:{chip:02}.0"
        files |= {f"{folder}/vendor": "0x1ae0\n", f"{folder}/device": f"{pci_device}\n"}
        files[f"{folder}/subsystem_device"] = "0x004f\n"  # tells a v3 from a v2
    for gpu in range(gpus):
        files[f"/proc/driver/nvidia/gpus/0000:0{gpu}/information"] = "Model: Tesla T4\n"
    return files


@pytest.fixture
def machine(monkeypatch):
    """Sets the hardware of this machine and its TPU stack; the environment is restored."""
    for name in STEERING:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)

    def has(chips=0, gpus=0, pci_device="0x0063", stacks=("torch_xla",)):
        host = RecordedHost({"files": files_of(chips, gpus, pci_device), "environment": os.environ})
        monkeypatch.setattr(select, "Host", lambda: host)
        monkeypatch.setattr(tpu_stack.importlib.util, "find_spec", lambda name: name in stacks)

    return has


@pytest.mark.parametrize(
    ("chips", "gpus", "kind"), [(8, 2, "tpu"), (0, 2, "gpu"), (0, 0, "cpu"), (8, 0, "tpu")]
)
def test_auto_takes_what_is_there(machine, chips, gpus, kind):
    machine(chips, gpus)
    assert find_kind(HardwareOptions()) == kind


def test_no_tpu_names_both_ways_on(machine):
    machine()
    with pytest.raises(HardwareError) as failure:
        find_kind(HardwareOptions(hw="tpu"))
    assert failure.value.id == "no-tpu"
    assert "PJRT_DEVICE=CPU" in failure.value.hint
    assert "probe-batch --target v5e-8" in failure.value.hint


def test_pjrt_device_tpu_alone_is_no_tpu(machine, monkeypatch):
    """The runtime would hang there."""
    machine()
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    with pytest.raises(HardwareError):
        find_kind(HardwareOptions(hw="tpu"))


@pytest.mark.parametrize(
    ("chips", "gpus", "options"),
    [
        (0, 0, HardwareOptions(hw="gpu")),
        (0, 2, HardwareOptions(hw="gpu", devices=3)),
        (8, 0, HardwareOptions(hw="tpu", precision="fp16")),
        (8, 0, HardwareOptions(hw="tpu", memory_limit=2**30)),
        (0, 0, HardwareOptions(hw="cpu", devices=0)),
    ],
)
def test_what_cannot_be_is_an_error(machine, chips, gpus, options):
    machine(chips, gpus)
    with pytest.raises(HardwareError):
        find_kind(options)


def test_torch_xla_missing(machine, monkeypatch):
    machine(8)
    monkeypatch.setattr(tpu_stack.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(HardwareError, match="not installed"):
        find_kind(HardwareOptions(hw="tpu"))


@pytest.mark.parametrize(
    ("asked", "kind", "native", "chosen"),
    [
        ("auto", "tpu", True, "bf16"),
        ("auto", "gpu", True, "bf16"),
        ("auto", "gpu", False, "fp16"),  # a T4 emulates bf16
        ("bf16", "gpu", False, "bf16"),
        ("auto", "cpu", False, "fp32"),
        ("bf16", "cpu", False, "bf16"),
        ("fp32", "tpu", True, "fp32"),
    ],
)
def test_precision(asked, kind, native, chosen):
    assert choose_precision(asked, kind, native_bf16=native) == chosen


def test_rank_count(machine):
    machine(gpus=2)
    assert rank_count(HardwareOptions(), "gpu") == 2
    assert rank_count(HardwareOptions(devices=1), "gpu") == 1
    assert rank_count(HardwareOptions(devices=3), "cpu") == 3
    assert rank_count(HardwareOptions(devices=8), "tpu") == 1


def test_environment_of_emulation(machine, monkeypatch):
    machine()
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    prepare_environment(HardwareOptions(hw="tpu", devices=4))
    assert os.environ["CPU_NUM_DEVICES"] == "4"


def test_environment_of_part_of_a_tpu(machine, monkeypatch):
    machine(8)
    monkeypatch.setenv("TPU_PROCESS_ADDRESSES", "local")
    prepare_environment(HardwareOptions(devices=4))
    assert os.environ["TPU_VISIBLE_CHIPS"] == "0,1,2,3"
    assert os.environ["TPU_CHIPS_PER_PROCESS_BOUNDS"] == "2,2,1"
    assert "TPU_PROCESS_ADDRESSES" not in os.environ
    with pytest.raises(HardwareError, match="--devices 3"):
        prepare_environment(HardwareOptions(devices=3))


def test_part_of_a_tpu_whose_chips_are_two_devices_each(machine):
    machine(chips=4, pci_device="0x0076")
    prepare_environment(HardwareOptions(devices=8))
    assert "TPU_VISIBLE_CHIPS" not in os.environ
    prepare_environment(HardwareOptions(devices=4))
    assert os.environ["TPU_VISIBLE_CHIPS"] == "0,1"
    with pytest.raises(HardwareError, match="--devices 1"):
        prepare_environment(HardwareOptions(devices=1))


def test_environment_of_a_gpu(machine):
    machine(gpus=1)
    prepare_environment(HardwareOptions(deterministic=True))
    assert os.environ["USE_TORCH_XLA"] == "0"
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


@pytest.mark.parametrize(("torch", "stack"), [("2.9.0", "torch_xla"), ("2.13.0", "torch_tpu")])
def test_with_both_stacks_torch_decides(machine, monkeypatch, torch, stack):
    machine(stacks=("torch_xla", "torch_tpu"))
    monkeypatch.setattr(tpu_stack.importlib.metadata, "version", lambda name: torch)
    assert tpu_stack.installed_stack() == stack


def test_torch_tpu_runs_one_rank_a_device(machine):
    machine(chips=8, stacks=("torch_tpu",))
    options = HardwareOptions()
    assert prepare_environment(options) == "tpu"
    assert os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0"
    assert os.environ[tpu_stack.RANKS_VARIABLE] == "8"
    assert rank_count(options, "tpu") == 8
    assert rank_count(HardwareOptions(devices=4), "tpu") == 4
    with pytest.raises(HardwareError, match=r"--devices 2: .*1, 4, 8"):
        find_kind(HardwareOptions(devices=2))


@pytest.mark.parametrize("pjrt_device", [None, "CPU"])
def test_torch_tpu_without_a_tpu_is_refused(machine, monkeypatch, pjrt_device):
    machine(stacks=("torch_tpu",))
    if pjrt_device:
        monkeypatch.setenv("PJRT_DEVICE", pjrt_device)
    with pytest.raises(HardwareError, match="torch_tpu runs on TPUs only") as failure:
        find_kind(HardwareOptions(hw="tpu"))
    assert failure.value.id == "no-tpu"
    assert "torch_xla" in failure.value.hint


def test_torch_tpu_starts_at_v4(machine):
    machine(chips=1, pci_device="0x0027", stacks=("torch_tpu",))
    with pytest.raises(HardwareError, match="starts at v4"):
        find_kind(HardwareOptions(hw="tpu"))


def test_cpu_runs_leave_torch_tpu_alone(machine):
    machine(stacks=("torch_tpu",))
    prepare_environment(HardwareOptions(hw="cpu"))
    assert os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0"


def test_deciding_imports_no_torch():
    code = (
        "import sys; from tpukit.hardware import options, select; "
        "import tpukit.hardware.launch.launcher; "
        "select.prepare_environment(options.HardwareOptions(hw='cpu')); "
        "sys.exit(any(m in sys.modules for m in ('torch', 'torch_xla', 'accelerate', 'jax')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_process_that_opened_a_tpu_is_known_by_torch_xlas_runtime(monkeypatch):
    """Without a TPU the runtime never opens one: a module that says so stands in."""
    for is_open in (False, True):
        runtime = SimpleNamespace(_xla_runtime_is_initialized=lambda answer=is_open: answer)
        monkeypatch.setitem(sys.modules, "torch_xla", SimpleNamespace(_XLAC=runtime))
        monkeypatch.delenv("PJRT_DEVICE", raising=False)
        assert select.holds_tpu() is is_open
        monkeypatch.setenv("PJRT_DEVICE", "CPU")
        assert not select.holds_tpu()
    monkeypatch.delitem(sys.modules, "torch_xla")
    assert not select.holds_tpu()


def test_new_tensors_on_another_device_are_refused():
    import torch

    told = pytest.raises(HardwareError, match=r"set_default_device\('meta'\) is in effect")
    with torch.device("meta"), told, select.opened_backend(HardwareOptions(hw="cpu")):
        pass
