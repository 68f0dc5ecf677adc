"""Freed memory: under a limit it is free for the next batch; without one the process keeps it."""

import pytest
from runs import VIRTUAL_TPU, printed, script


def words_of(source, folder, **environment):
    """The words that a script prints, in a process of its own."""
    (folder / "script.py").write_text(source)
    return printed(script(folder / "script.py", env=environment)).split()


FREED = """
import torch
from tpukit.hardware.memory import data_bytes, limit_host_memory

limit_host_memory(2**30)
del_later = torch.empty(2**22)  # freed, it teaches glibc to keep what is smaller
del del_later
held = [torch.empty(2**18) for _ in range(64)]  # 1 MiB each
before = data_bytes()
held = held[::2]
print(before - data_bytes())
"""


def test_freed_tensors_leave_room_under_a_limit(tmp_path):
    [freed] = words_of(FREED, tmp_path)
    assert int(freed) >= 32 * 2**20


KEPT = """
import torch
from tpukit.hardware.memory import resident_bytes
from tpukit.hardware.options import HardwareOptions
from tpukit.hardware.select import opened_backend

with opened_backend(HardwareOptions(hw="cpu")):
    tensors = [torch.ones(2**24) for _ in range(4)]  # 64 MiB each
    above = torch.ones(2**12)
    full, _ = resident_bytes()
    del tensors
    print(full - resident_bytes()[0])
print(full - resident_bytes()[0])
"""


def test_a_process_keeps_freed_tensors_until_the_backend_is_closed(tmp_path):
    during, afterwards = map(int, words_of(KEPT, tmp_path))
    assert during < 16 * 2**20
    assert afterwards >= 240 * 2**20


COMPILED = """
import torch
from tpukit.hardware.memory import limit_tensor_memory, meter_process_memory

torch.ones(1)
limit = limit_tensor_memory(2**28)
with meter_process_memory(2**28, tensors_alone=True) as read_memory:
    compiler = [bytearray(2**14) for _ in range(2**15)]  # 512 MiB
    limit.enforce()
    tensor = torch.ones(2**25)  # 128 MiB
    print(read_memory().peak >> 20)
    try:
        torch.ones(2**26)
    except RuntimeError:
        print("over")
"""


def test_a_limit_on_tensors_leaves_out_what_a_compiler_holds(tmp_path):
    peak, over = words_of(COMPILED, tmp_path)
    assert 128 <= int(peak) < 160
    assert over == "over"


IN_FLIGHT = """
import torch
from tpukit.hardware.select import open_backend, prepare_environment
from tpukit.hardware.memory import data_bytes
from tpukit.hardware.options import HardwareOptions

hardware = HardwareOptions(hw="tpu", memory_limit=2**33)
prepare_environment(hardware)
backend = open_backend(hardware)
device = backend.device


def step():
    batch = torch.ones(2048, 2048).to(device)  # 16 MiB
    total = (batch @ (batch @ (batch @ batch[:, :256]))).sum()
    backend.finish()
    return total


step()
before = data_bytes()
totals = [step() for _ in range(12)]
print(data_bytes() - before)
"""


@pytest.mark.xla
def test_steps_under_a_limit_wait_for_each_other(tmp_path):
    """Those in flight would each hold their batch and more: 12 of them, 192 MiB and more."""
    [held] = words_of(IN_FLIGHT, tmp_path, **{**VIRTUAL_TPU, "CPU_NUM_DEVICES": "1"})
    assert int(held) < 96 * 2**20
