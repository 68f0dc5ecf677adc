"""A process on the CPU ends with its own error before the system runs out of memory."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import runs

from tpukit.hardware import memory

SMALL = Path(runs.SUPPORT) / "small_machine"
HUNGRY = f"{runs.SUPPORT / 'probe_tasks.py'}:Hungry"


def on_small_machine(size: int) -> dict[str, str]:
    """The environment of processes on a machine of this many bytes."""
    path = os.pathsep.join([str(SMALL), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path, "SMALL_MACHINE": str(size)}


def python(code: str, size: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env=runs.environment(on_small_machine(size)), capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip


def test_a_run_that_needs_more_than_the_machine_has_ends_with_one_error(tmp_path):
    """Each of its 128 samples takes 20 MB: 2.5 GB."""
    done = runs.tpukit(
        "train", "--task", HUNGRY, "--global-batch-size", "128", "--accumulate", "1",
        "--num-workers", "0", "--results-dir", tmp_path, "--hw", "cpu",
        env=on_small_machine(1_500_000_000),
    )  # fmt: skip
    told = runs.failure(done, 1)
    assert "out of memory" in told and "1.40 GiB are available" in told and "in step 1" in told
    assert "--memory-limit" in told and len(told.splitlines()) == 2


@pytest.mark.slow
def test_a_search_on_a_small_machine_ends_with_what_fits():
    """128 samples are tried where 1.9 GB are free; without a watch they would take 2.6 GB."""
    words = ("--task", HUNGRY, "--hw", "cpu", "--start", "128", "--trial-time", "1h", "--json")
    found = runs.result(runs.tpukit("probe-batch", *words, env=on_small_machine(2_500_000_000)))
    assert found["trials"][0]["verdict"] == "over"
    assert "SIGKILL" not in json.dumps(found["trials"])
    assert 8 <= found["largest_batch_per_device"] < 110
    assert found["limit_bytes"] < 2_500_000_000


ALLOCATES = """
import numpy as np
from tpukit.errors import OutOfMemoryError
from tpukit.hardware.launch.memory_watch import watched_memory

try:
    with watched_memory():
        held = []
        while True:
            held.append({more})
except OutOfMemoryError as error:
    held = None
    print(error)
print(np.ones(2**26).nbytes)  # afterwards there is no limit
"""


@pytest.mark.parametrize(
    "more",
    [pytest.param("np.ones(2**22)", marks=pytest.mark.slow), "bytearray(2**18)", "np.empty(2**30)"],
    ids=["arrays", "small", "untouched"],
)  # fmt: skip
def test_an_allocation_into_the_reserve_fails(more):
    done = python(ALLOCATES.replace("{more}", more), 2**30)
    said, after = done.stdout.partition("out of memory")[1:], done.stdout.splitlines()[-1]
    assert said[0] and "of 1.00 GiB are available, 256 MiB of which stay free" in said[1]
    assert int(after) == 2**29


def test_a_small_process_is_watched_where_others_took_all_memory():
    """Its limit leaves no room for the stack of the thread that looks."""
    code = "from tpukit.hardware.launch.memory_watch import watched_memory as watched\n"
    done = python(f"{code}with watched():\n    print('in')\nprint('out')", 2**24)
    assert (done.stdout.split(), done.returncode) == (["in", "out"], 0), done.stderr


TAKES_HALF_A_GIBIBYTE = """
import numpy as np
from tpukit.hardware.launch.memory_watch import watched_memory

with watched_memory():
    np.empty(2**26)
"""


@pytest.mark.parametrize(("ranks", "code"), [("1", 0), ("2", 1)])
def test_the_ranks_of_a_machine_share_what_is_left(ranks, code, monkeypatch):
    """Each could take all of it before the others look again."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert python(TAKES_HALF_A_GIBIBYTE, 2**30).returncode == code


HOARDS = """
import numpy as np
from tpukit.probe.trial import TaskSource, TrialRequest, TrialSetup
from tpukit.probe.trials.worker import TrialRunner
from tpukit.train.config import TrainConfig

held = []
TrialRunner._forms = property(lambda self: held.extend(np.ones(2**22) for _ in range(48)))
runner = TrialRunner(TrialSetup(TaskSource("", {}), TrainConfig(hw="cpu")))
assert not runner.result(TrialRequest(1))["trial"]["fits"]
print(len(held))
"""


def test_data_that_a_task_loads_before_the_trials_is_watched_too(tmp_path):
    """1.5 GiB."""
    (tmp_path / "hoards.py").write_text(HOARDS)
    done = runs.script(tmp_path / "hoards.py", env=on_small_machine(2**30))
    assert 0 < int(done.stdout) < 40


OTHERS = '''
import subprocess, sys, time
import numpy as np
from tpukit.hardware.launch.memory_watch import watched_memory

TAKE = """
import resource, time

resource.setrlimit(resource.RLIMIT_DATA, (-1, -1))  # else this process' limit is the child's
held = bytearray({size})
time.sleep(60)
"""
with watched_memory():
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    child = subprocess.Popen([sys.executable, "-c", TAKE], **silent)
    try:
        while child.poll() is None:
            sum(range(1000)){stays}
    finally:
        child.kill()
'''


def takes_others(mebibytes: int, stays: str = "") -> str:
    """A process whose child takes memory."""
    return OTHERS.replace("{size}", str(mebibytes << 20)).replace("{stays}", stays)


def test_memory_that_children_take_ends_the_process_by_an_exception():
    """This process allocates nothing: no limit of its own would notice."""
    done = python(takes_others(880), 2**30)
    assert "OutOfMemoryError: out of memory: " in done.stderr and done.returncode == 1


def test_a_process_that_does_not_return_to_python_is_ended():
    code = takes_others(1000, "; time.sleep(30)")
    done = python(code, 2**30)
    assert done.stderr.startswith("Error: out of memory: ") and done.returncode == 1


COMPILES = """
import sys, time
from tpukit.hardware.launch.child import Child
from tpukit.hardware.launch.memory_watch import end_before_memory_does

TAKE = '''
import ctypes, mmap

libc = ctypes.PyDLL(None)  # keeps the interpreter's lock
libc.fopen.restype = ctypes.c_void_p
mapped = mmap.mmap(-1, 2**30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
held = (ctypes.c_char * 2**30).from_buffer(mapped)
libc.fread(held, 1, 2**30, ctypes.c_void_p(libc.fopen(b"/dev/urandom", b"rb")))
'''
with Child({}, ("-c", TAKE)) as child:
    end_before_memory_does(child)
    print(child.output())
"""


def test_native_code_is_ended_before_the_reserve_is_used_up():
    """One call that fills a GiB and holds the interpreter's lock, as libtpu does: no exception and
    no thread of its own process reaches it."""
    done = python(COMPILES, 5 * 2**27)
    said = re.search(r"Error: out of memory: (\d+) MiB of 640 MiB are available, 256", done.stdout)
    # Half of the reserve is where other processes are ended.
    assert said and int(said[1]) > 128, done.stdout + done.stderr


@pytest.mark.plan
@pytest.mark.xla
def test_a_compiler_on_a_small_machine_ends_with_an_error(tmp_path):
    """libtpu alone takes more."""
    done = runs.tpukit(
        "probe-batch", "--task", HUNGRY, "--target", "v5e-1", "--start", "2", "--json",
        env=on_small_machine(900_000_000) | {"TPUKIT_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    error = json.loads(done.stdout)["error"]
    assert error["id"] == "compiler-memory" and "at fast effort" in error["message"]
    # Where the image lacks jax, a line before these says that it is installed.
    lines = [line for line in done.stderr.splitlines() if "Installing it once" not in line]
    assert done.returncode == 1 and len(lines) == 3, done.stderr


@pytest.mark.slow
@pytest.mark.xla
def test_xla_ends_with_the_same_error(tmp_path):
    """With a limit, a device would wait for the one whose allocation failed, and abort."""
    emulated = {**on_small_machine(2_000_000_000), "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2"}
    done = runs.tpukit(
        "train", "--task", HUNGRY, "--hw", "tpu", "--num-workers", "0", "--global-batch-size",
        "256", "--accumulate", "1", "--results-dir", tmp_path, env=emulated,
    )  # fmt: skip
    assert "out of memory: " in runs.failure(done, 1)


def test_a_process_that_holds_little_is_left_alone():
    """Others have taken all: its end would not help, and the next allocation may work."""
    code = "from tpukit.hardware.launch.memory_watch import MemoryWatch as W\nprint(W().look())"
    done = python(code, 1)
    assert done.stdout.strip() == "0.01", (done.returncode, done.stderr)


@pytest.mark.parametrize(
    ("version", "named", "files", "free"),
    [
        (2, "0::/a/b", {"a/memory.max": "3000", "a/memory.current": "2500",
                        "a/memory.stat": "anon 9\nactive_file 300\ninactive_file 100\n",
                        "a/b/memory.max": "max", "a/b/memory.current": "7"}, 900),
        (2, "0::/", {"memory.max": "1000", "memory.current": "400"}, 600),
        (1, "4:cpu,memory:/docker/x",
         {"memory/memory.limit_in_bytes": "2000", "memory/memory.usage_in_bytes": "1500",
          "memory/memory.stat": "active_file 1\ntotal_inactive_file 200\n"}, 700),
        (1, "4:memory:/", {"memory/memory.limit_in_bytes": str(2**63 - 4096),
                           "memory/memory.usage_in_bytes": "5"}, None),
    ],
)  # fmt: skip
def test_a_containers_memory_counts(version, named, files, free, tmp_path, monkeypatch):
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    read = memory._text
    monkeypatch.setattr(memory, "CONTROL_GROUPS", tmp_path)
    monkeypatch.setattr(
        memory, "_text", lambda path: named if str(path) == "/proc/self/cgroup" else read(path)
    )
    assert (memory.available_bytes() == free) == (free is not None)


def test_without_proc_resident_memory_stands_for_private_memory(monkeypatch):
    """macOS."""
    here = memory.resident_bytes()[0]
    monkeypatch.setattr(memory, "_text", lambda path: "")
    assert memory.data_bytes() == memory.private_bytes() == pytest.approx(here, rel=0.1)


@pytest.fixture
def control_group() -> Iterator[Path]:
    """A control group with 2.5 GB below this process' own, where one can be made (version 1)."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    name = next((line.split(":")[2] for line in lines if ":memory:" in line), None)
    group = Path(f"/sys/fs/cgroup/memory{name}") / f"tpukit-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(2_500_000_000))
    except OSError:
        pytest.skip("no control group can be made here")
    yield group
    group.rmdir()


@pytest.mark.slow
def test_the_kernel_kills_nothing_in_a_small_container(control_group, tmp_path):
    """A step of 256 samples needs 5 GB."""
    enter = f"echo $$ > {control_group}/cgroup.procs && exec "
    command = f"{sys.executable} -m tpukit train --task {HUNGRY} --hw cpu --num-workers 0"
    command += f" --global-batch-size 256 --accumulate 1 --results-dir {tmp_path}"
    done = subprocess.run(
        ["bash", "-c", enter + command], env=runs.environment(),
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "out of memory" in runs.failure(done, 1)
    killed = (control_group / "memory.oom_control").read_text().split()
    assert killed[killed.index("oom_kill") + 1] == "0"
