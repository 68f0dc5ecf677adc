"""Freed memory: under a limit it is free for the next batch; without one the process keeps it."""

from runs import printed, script


def words_of(source, folder):
    """The words that a script prints, in a process of its own."""
    (folder / "script.py").write_text(source)
    return printed(script(folder / "script.py")).split()


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
