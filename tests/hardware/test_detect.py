"""One detector: `doctor` and `train` give the same answer on every recorded machine."""

from pathlib import Path

import pytest
from recorded_host import RecordedHost

from tpukit.commands.reports.machine import as_json
from tpukit.hardware import select, tpu_stack
from tpukit.hardware.detect import detect_hardware
from tpukit.hardware.options import HardwareOptions
from tpukit.knowledge.accelerators import peak_flops, tpu_by_device_kind
from tpukit.probe.machine.facts import gather

MACHINES = sorted((Path(__file__).parents[1] / "probe/machine/machines").glob("*.toml"))
CHANGES = {
    "as recorded": {},
    "TPU_WORKER_ID": {"TPU_WORKER_ID": "0"},
    "CUDA_VISIBLE_DEVICES empty": {"CUDA_VISIBLE_DEVICES": ""},
    "CUDA_VISIBLE_DEVICES=1,0": {"CUDA_VISIBLE_DEVICES": "1,0"},
    "PJRT_DEVICE=CPU": {"PJRT_DEVICE": "CPU"},
    "PJRT_DEVICE=CUDA": {"PJRT_DEVICE": "CUDA"},
}
CONTAINER = RecordedHost({"folders": {"/dev/vfio/0": "", "/dev/vfio/vfio": ""}})


def changed(host, variables, files=None):
    """A recorded machine with further environment variables and device files."""
    tables = dict(host._tables)
    tables["environment"] = {**tables.get("environment", {}), **variables}
    tables["folders"] = {**tables.get("folders", {}), **(files or {})}
    return RecordedHost(tables)


def by_doctor(host):
    """What `doctor --json` reports: the kind, and how many devices of it."""
    hardware = as_json(gather(host, quick=True), [], ok=True)["hardware"]
    return hardware["kind"], len(hardware["devices"])


def by_train(host, monkeypatch):
    """What `train` and `probe-batch` select."""
    monkeypatch.setattr(select, "Host", lambda: host)
    for module in (select, tpu_stack):
        monkeypatch.setattr(module, "installed_stack", lambda: "torch_xla")
    kind = select.find_kind(HardwareOptions())
    ranks = select.rank_count(HardwareOptions(), kind)
    return kind, detect_hardware(host).tpu.devices if kind == "tpu" else ranks


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("machine", MACHINES, ids=lambda path: path.stem)
def test_doctor_and_train_agree(machine, change, monkeypatch):
    for files in ({}, {"/dev/vfio/0": ""}, {"/dev/nvidia0": ""}):
        host = changed(RecordedHost.recorded(machine), CHANGES[change], files)
        assert by_doctor(host) == by_train(host, monkeypatch), files


@pytest.mark.parametrize(
    ("variables", "answer"),
    [
        ({}, ("cpu", 1)),
        ({"TPU_WORKER_ID": "0"}, ("tpu", 1)),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, ("tpu", 1)),
        ({"ISTPUVM": "1"}, ("tpu", 1)),
        ({"ISTPUVM": ""}, ("cpu", 1)),
        ({"TPU_ACCELERATOR_TYPE": "v5litepod-1"}, ("tpu", 1)),
        ({"TPU_WORKER_ID": "0", "PJRT_DEVICE": "CPU"}, ("cpu", 1)),
    ],
)
def test_a_tpu_passed_into_a_container(variables, answer, monkeypatch):
    host = changed(CONTAINER, variables)
    assert by_doctor(host) == by_train(host, monkeypatch) == answer


def test_generation_by_the_cloud_name_where_the_bus_is_hidden():
    host = changed(CONTAINER, {"TPU_ACCELERATOR_TYPE": "v5litepod-8"})
    assert detect_hardware(host).tpu.name == "TPU v5e"
    unknown = changed(CONTAINER, {"TPU_ACCELERATOR_TYPE": "v99-8"})
    assert detect_hardware(unknown).tpu.name == "TPU (unknown generation)"


@pytest.mark.parametrize(
    ("visible", "answer"),
    [
        (None, ("gpu", 2)), ("0", ("gpu", 1)), ("1,0", ("gpu", 2)), ("", ("cpu", 1)),
        ("-1", ("cpu", 1)), ("0,-1,1", ("gpu", 1)), ("2", ("cpu", 1)), ("0,7,1", ("gpu", 1)),
        ("GPU-8932f937", ("gpu", 1)),
    ],
)  # fmt: skip
def test_visible_gpus(visible, answer, monkeypatch):
    machine = next(path for path in MACHINES if path.stem == "kaggle-2xt4")
    variables = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    host = changed(RecordedHost.recorded(machine), variables)
    assert by_doctor(host) == by_train(host, monkeypatch) == answer


def test_the_selected_gpu_is_the_one_described():
    host = RecordedHost({
        "files": {f"/proc/driver/nvidia/gpus/{slot}/information": f"Model: {name}\n"
                  for slot, name in enumerate(("Tesla T4", "NVIDIA L4"))},
        "environment": {"CUDA_VISIBLE_DEVICES": "1"},
        "commands": {"nvidia-smi": "Tesla T4, 15360, 570, 7.5\nNVIDIA L4, 23034, 570, 8.9\n"},
    })  # fmt: skip
    for quick in (True, False):
        (gpu,) = gather(host, quick=quick).gpus
        assert (gpu.name, gpu.capability) == ("NVIDIA L4", 8.9)


def test_other_devices_of_google_and_nvidia_are_not_tpus():
    functions = [("0x1ae0", "0x0063"), ("0x1ae0", "0x0063"), ("0x1ae0", "0x001f"),
                 ("0x10de", "0x2330")]  # fmt: skip
    files = {}
    for slot, (vendor, device) in enumerate(functions):
        folder = f"/sys/bus/pci/devices/0000:00:{slot:02}.0"
        files |= {f"{folder}/vendor": f"{vendor}\n", f"{folder}/device": f"{device}\n"}
    assert detect_hardware(RecordedHost({"files": files})).tpu.chips == 2


@pytest.mark.parametrize(
    ("kind", "generation"),
    [("TPU v2", "v2"), ("TPU v3", "v3"), ("TPU v4", "v4"), ("TPU v5 lite", "v5e"),
     ("TPU v5p", "v5p"), ("TPU v6 lite", "v6e"), ("TPU7x", "v7x"), ("cpu", None)],
)  # fmt: skip
def test_generations_by_the_runtimes_name(kind, generation):
    found = tpu_by_device_kind(kind)
    assert (found and found.name) == generation
    # Pallas kernels multiply bfloat16, which cores have from v4 on.
    assert (found is not None and found.has_kernels) == (generation not in ("v2", "v3", None))


@pytest.mark.parametrize(
    ("name", "precision", "tera"),
    [("Tesla T4", "fp16", 65), ("Tesla T4", "bf16", None), ("NVIDIA H200", "bf16", 989),
     ("NVIDIA A100-SXM4-40GB", "fp32", 19.5), ("NVIDIA L40S", "bf16", 362),
     ("NVIDIA L40", "bf16", None),
     ("TPU v2", "bf16", 22.5), ("TPU v4", "bf16", 275), ("TPU v5 lite", "bf16", 197),
     ("TPU v5", "bf16", 459), ("TPU v6 lite", "bf16", 918), ("TPU v5 lite", "fp32", None)],
)  # fmt: skip
def test_peaks_are_those_of_the_data_sheets(name, precision, tera):
    assert peak_flops(name, precision) == (tera and tera * 1e12)
