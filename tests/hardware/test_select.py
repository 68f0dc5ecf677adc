"""What is chosen on made-up machines: without torch, and nothing falls back in silence."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tpukit.errors import HardwareError
from tpukit.hardware import detect as presence
from tpukit.hardware import select as choice
from tpukit.hardware.options import HardwareOptions
from tpukit.hardware.precision import choose_precision
from tpukit.hardware.select import find_kind, prepare_environment, process_count

STEERING = ("PJRT_DEVICE", "CPU_NUM_DEVICES", "CUDA_VISIBLE_DEVICES", "TPU_PROCESS_ADDRESSES",
            "TPU_VISIBLE_CHIPS", "TPU_CHIPS_PER_PROCESS_BOUNDS", "TPU_PROCESS_BOUNDS",
            "USE_TORCH_XLA", "PYTORCH_CUDA_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG",
            "TF_CPP_MIN_LOG_LEVEL", *presence.TPU_VARIABLES)  # fmt: skip


@pytest.fixture
def machine(monkeypatch):
    """Sets what is here: TPU chips and GPUs; the environment is as it was afterwards."""
    for name in STEERING:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)

    def is_made_of(chips=0, gpus=0):
        monkeypatch.setattr(presence, "has_tpu", lambda: chips > 0)
        monkeypatch.setattr(presence, "tpu_chips", lambda: chips)
        monkeypatch.setattr(presence, "gpu_count", lambda: gpus)

    return is_made_of


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
    monkeypatch.setattr(choice.importlib.util, "find_spec", lambda name: None)
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


def test_processes(machine):
    machine(gpus=2)
    assert process_count(HardwareOptions(), "gpu") == 2
    assert process_count(HardwareOptions(devices=1), "gpu") == 1
    assert process_count(HardwareOptions(devices=3), "cpu") == 3
    assert process_count(HardwareOptions(devices=8), "tpu") == 1


def test_environment_of_a_rehearsal(machine, monkeypatch):
    machine()
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    prepare_environment(HardwareOptions(hw="tpu", devices=4))
    assert choice.os.environ["CPU_NUM_DEVICES"] == "4"


def test_environment_of_part_of_a_tpu(machine, monkeypatch):
    machine(8)
    monkeypatch.setenv("TPU_PROCESS_ADDRESSES", "local")
    prepare_environment(HardwareOptions(devices=4))
    assert choice.os.environ["TPU_VISIBLE_CHIPS"] == "0,1,2,3"
    assert choice.os.environ["TPU_CHIPS_PER_PROCESS_BOUNDS"] == "2,2,1"
    assert "TPU_PROCESS_ADDRESSES" not in choice.os.environ
    with pytest.raises(HardwareError, match="--devices 3"):
        prepare_environment(HardwareOptions(devices=3))


def test_environment_of_a_gpu(machine):
    machine(gpus=1)
    prepare_environment(HardwareOptions(deterministic=True))
    assert choice.os.environ["USE_TORCH_XLA"] == "0"
    assert choice.os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_devices_by_their_files(tmp_path):
    for number, (vendor, device) in enumerate(
        [("0x1ae0", "0x0063"), ("0x1ae0", "0x0063"), ("0x1ae0", "0x001f"), ("0x10de", "0x2330")]
    ):
        folder = tmp_path / f"sys/bus/pci/devices/0000:00:{number:02}.0"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(vendor + "\n")
        (folder / "device").write_text(device + "\n")
    assert presence.tpu_chips(tmp_path) == 2
    assert presence.has_tpu({}, tmp_path)


def test_a_tpu_passed_into_a_container(tmp_path):
    (tmp_path / "dev/vfio").mkdir(parents=True)
    (tmp_path / "dev/vfio/0").touch()
    assert not presence.has_tpu({}, tmp_path)
    assert presence.has_tpu({"ISTPUVM": "1"}, tmp_path)


@pytest.mark.parametrize(
    ("visible", "count"), [(None, 2), ("0", 1), ("1,0", 2), ("", 0), ("-1", 0), ("0,-1,1", 1)]
)
def test_gpus_by_their_files(tmp_path, visible, count):
    for number in range(2):
        (tmp_path / f"proc/driver/nvidia/gpus/0000:0{number}").mkdir(parents=True)
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert presence.gpu_count(environment, tmp_path) == count


def test_deciding_imports_no_torch():
    code = (
        "import sys; from tpukit.hardware import options, select; "
        "import tpukit.hardware.launch.launcher; "
        "select.prepare_environment(options.HardwareOptions(hw='cpu')); "
        "sys.exit(any(m in sys.modules for m in ('torch', 'torch_xla', 'accelerate', 'jax')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
