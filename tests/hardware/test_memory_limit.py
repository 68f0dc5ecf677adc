"""The limit on a process' memory: what is freed is free for the next batch."""

from __future__ import annotations

import subprocess
import sys

FREED = """
import torch
from tpukit.hardware.memory_limit import data_bytes, limit_host_memory

limit_host_memory(2**30)
del_later = torch.empty(2**22)  # freed, it teaches glibc to keep what is smaller
del del_later
held = [torch.empty(2**18) for _ in range(64)]  # 1 MiB each
before = data_bytes()
held = held[::2]
print(before - data_bytes())
"""


def test_freed_tensors_leave_room_under_a_limit():
    done = subprocess.run(
        [sys.executable, "-c", FREED], capture_output=True, text=True, check=True, timeout=120
    )
    assert int(done.stdout) >= 32 * 2**20
