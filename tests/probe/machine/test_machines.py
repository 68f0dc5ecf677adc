# ruff: noqa: E501 - a case is one line
"""Recorded machines, each with its expected facts and verdicts."""

from pathlib import Path

import pytest
from cases import read_cases
from recorded_host import RecordedHost

from tpukit.commands.reports.machine import as_json
from tpukit.errors import DataError
from tpukit.probe.machine.checks import QUICK
from tpukit.probe.machine.facts import gather
from tpukit.probe.machine.verdict import CheckOptions, run_check

MACHINES = Path(__file__).parent / "machines"
EXPECTED = read_cases(__file__)


def machine(name: str) -> RecordedHost:
    return RecordedHost.recorded(MACHINES / f"{name}.toml")


def check_all(host: RecordedHost, *, quick: bool = False, options: CheckOptions | None = None):
    facts = gather(host, quick=quick)
    return facts, {r.id: r for r in (run_check(c, facts, options or CheckOptions()) for c in QUICK)}


def test_every_recording_is_expected():
    assert {path.stem for path in MACHINES.glob("*.toml")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_facts_verdicts_and_fixes_of_a_machine(name):
    facts, results = check_all(machine(name))
    found, expected = as_json(facts, results.values(), ok=True)["hardware"], EXPECTED[name]
    assert (found["kind"], found["place"]) == (expected["kind"], expected["place"])
    assert len(found["devices"]) == expected["devices"]
    for device in found["devices"]:
        assert device["memory_bytes"] == expected["memory_kib"] * 1024
        assert device["bf16"] == expected["bf16"]
    wanted = expected["verdicts"]
    assert {id: results[id].verdict.status for id in wanted} == wanted
    failing = {id for id, result in results.items() if result.verdict.status == "fail"}
    assert failing == {id for id, status in wanted.items() if status == "fail"}
    for result in results.values():
        assert (result.verdict.fix is not None) == (result.verdict.status in ("warn", "fail"))
        assert "the check itself failed" not in result.verdict.message
    for check, fix in expected.get("fixes", {}).items():
        assert fix in results[check].verdict.fix


NO_AUTOLOAD = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
TORCH_TPU = {"PJRT_DEVICE": "TPU", "TORCH_TPU_LAUNCH_BLOCKING": "1"}
OLD_JAX = {"jax": "0.4.1", "jaxlib": "0.4.1"}
OTHER_JAX = {"torch-xla": "2.9.0", "jax": "0.6.0", "jaxlib": "0.6.0"}
NO_GXX = {"missing_programs": {"g++": ""}}
READ_ONLY = {"read_only": {"/home": ""}}
CHANGED = [
    ("tpu-held-by-another", {}, None, "tpu-free", "fail", "pid 311 (python3 train.py) holds /dev/vfio/0"),
    ("kaggle-tpu-v5e-8", {"folders": {"/tmp/libtpu_lockfile": ""}}, None, "tpu-free", "warn", "rm /tmp/libtpu_lockfile"),
    ("laptop", {"disks": {"/dev/shm": [0.0625, 0.0625]}}, None, "shared-memory", "warn", ""),
    ("laptop", {"disks": {".": [20, 0.5]}}, None, "free-disk", "fail", ""),
    ("h200", {"package_files": {"torch/version.py": "cuda: Optional[str] = None\n"}}, None, "gpu-architecture", "fail", ""),
    ("kaggle-2xt4", {"package_files": {"torch/version.py": "cuda: Optional[str] = '13.0'\n"}, "packages": {"torch": "2.9.0+cu130"}}, None, "driver", "fail", ""),
    ("laptop-with-torch-tpu", {"packages": {"torch-xla": "2.9.0"}, "environment": NO_AUTOLOAD}, None, "torch-tpu", "fail", "one environment"),
    ("laptop-with-torch-tpu", {}, None, "torch-tpu", "fail", "hangs"),
    ("laptop-with-torch-tpu", {}, None, "torch-tpu", "fail", "export TORCH_DEVICE_BACKEND_AUTOLOAD=0"),
    ("laptop-with-torch-tpu", {"environment": NO_AUTOLOAD}, None, "torch-tpu", "pass", ""),
    ("laptop-with-torch-tpu", {}, TORCH_TPU, "pjrt-device", "skip", ""),
    ("laptop-with-torch-tpu", {}, TORCH_TPU, "variables", "warn", "unset TORCH_TPU_LAUNCH_BLOCKING"),
    ("laptop-with-torch-tpu", {"packages": {"torch-xla": "2.9.0"}}, TORCH_TPU, "pjrt-device", "fail", ""),
    ("colab-tpu", {"packages": {"torch-xla": "2.13.0", "torch": "2.13.0"}}, None, "libtpu", "skip", ""),
    ("kaggle-tpu-v5e-8", {"packages": OLD_JAX}, None, "jax", "warn", "environment of its own"),
    ("laptop", {"packages": OTHER_JAX}, None, "jax", "warn", "pip install 'jax==0.7.1' 'jaxlib==0.7.1'"),
    ("laptop", {"packages": {**OTHER_JAX, "flax": "0.11.0"}}, None, "jax", "warn", "flax may need"),
    ("laptop", {"packages": {**OTHER_JAX, "flax": "0.11.0"}}, None, "jax", "warn", "own/bin/pip"),
    ("laptop", READ_ONLY, {"HOME": "/home/ada"}, "cache", "warn", ""),
    ("laptop", READ_ONLY, {"HOME": "/home/ada", "XDG_CACHE_HOME": "/var/cache"}, "cache", "pass", ""),
    ("laptop", READ_ONLY, {"TPUKIT_CACHE_DIR": "/home/ada/cache"}, "cache", "fail", ""),
    ("h200", NO_GXX, None, "cxx-compiler", "warn", ""),
    ("laptop", NO_GXX, None, "cxx-compiler", "warn", ""),
    ("colab-tpu", NO_GXX, None, "cxx-compiler", "skip", ""),
    ("laptop", NO_GXX, {"CXX": "clang++"}, "cxx-compiler", "pass", ""),
]  # fmt: skip
"""Machine, tables that are changed, environment (None: the recorded one), check, status, text."""


@pytest.mark.parametrize(("name", "tables", "environment", "check", "status", "says"), CHANGED)
def test_verdict_of_a_changed_machine(name, tables, environment, check, status, says):
    host = machine(name)
    for table, values in tables.items():
        host._tables.setdefault(table, {}).update(values)
    host.environment = host.environment if environment is None else environment
    verdict = check_all(host)[1][check].verdict
    assert verdict.status == status
    assert says in f"{verdict.message} {verdict.fix}"


@pytest.mark.parametrize("name", ["kaggle-2xt4", "kaggle-p100-cuda-12.8", "h200"])
def test_quick_asks_no_program(name):
    host = machine(name)
    host.run = lambda command, seconds: pytest.fail(f"{command} was started")
    facts, _ = check_all(host, quick=True)
    assert all(gpu.capability for gpu in facts.gpus)


@pytest.mark.parametrize(
    ("python", "torch", "libtpu", "check", "status", "said"),
    [
        ("3.11.9", "2.15.0", "0.0.52", "torch-tpu", "pass", "torch_tpu 0.2.0"),
        ("3.14.0", "2.11.0", "0.0.50", "libtpu", "pass", "libtpu 0.0.50"),
        ("3.10.14", "2.11.0", "0.0.50", "torch-tpu", "warn", "Python 3.11 to 3.14, none for 3.10"),
        ("3.15.0", "2.15.0", "0.0.50", "torch-tpu", "warn", "none for 3.15.0"),
        ("3.12.3", "2.10.0", "0.0.50", "torch-tpu", "fail", "needs torch 2.11 to 2.15"),
        ("3.12.3", "2.16.0", "0.0.50", "torch-tpu", "fail", "needs torch 2.11 to 2.15"),
        ("3.12.3", "2.13.0", "0.0.21", "libtpu", "fail", "needs libtpu 0.0.50 or newer"),
        ("3.12.3", "2.13.0", None, "libtpu", "fail", "found none"),
    ],
)  # fmt: skip
def test_versions_of_torch_tpu(python, torch, libtpu, check, status, said):
    host = machine("laptop-with-torch-tpu")
    host._tables["environment"]["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    host.python = python
    host._tables["packages"] |= {"torch": torch, "libtpu": libtpu}
    verdict = check_all(host)[1][check].verdict
    assert verdict.status == status
    assert said in verdict.message


def test_empty_machine_has_answers():
    facts, results = check_all(RecordedHost({}))
    assert facts.kind == "cpu"
    assert results["torch-and-torch-xla"].verdict.status == "fail"
    assert all("itself failed" not in r.verdict.message for r in results.values())


@pytest.mark.parametrize("name", ["kaggle-tpu-v5e-8", "colab-tpu"])
def test_nothing_is_said_about_the_versions_of_a_free_image(name):
    _, results = check_all(machine(name))
    about = ("torch-and-torch-xla", "libtpu", "jax", "torchvision", "old-releases")
    assert {results[check].verdict.status for check in about} == {"pass"}
    assert results["tensorflow"].verdict.status in ("pass", "skip")


@pytest.mark.parametrize(("given", "count"), [("8", 8), ("1", 1), ("", 1), ("many", 1)])
def test_virtual_devices_are_counted(given, count):
    host = machine("laptop")
    host.environment = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": given}
    facts, results = check_all(host)
    hardware = as_json(facts, results.values(), ok=True)["hardware"]
    assert len(hardware["devices"]) == count
    assert ("8 virtual devices with --hw tpu" in results["device"].verdict.message) == (count == 8)
    host.environment = {"CPU_NUM_DEVICES": "8"}
    facts, results = check_all(host)
    assert len(as_json(facts, results.values(), ok=True)["hardware"]["devices"]) == 1


def test_recording_must_name_its_sources(tmp_path):
    recording = tmp_path / "guess.toml"
    recording.write_text('[packages]\ntorch = { is = "2.9.0" }\n')
    with pytest.raises(DataError, match="without a source"):
        RecordedHost.recorded(recording)
