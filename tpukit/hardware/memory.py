"""A real limit on the memory of a process, for rehearsals on a CPU."""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path

from tpukit.errors import HardwareError

MAPPED_ALONE_BYTES = 2**15
"""Allocations from this size on go back to the system when freed, under a limit."""
M_MMAP_THRESHOLD = -3


def limit_host_memory(limit_bytes: int) -> None:
    """From now on this process may hold `limit_bytes` more private memory than it holds already.

    Allocations beyond it fail as they would on a full device. Call it once the libraries and the
    device are up: what they took does not count.

    Raises:
        HardwareError: the system does not allow such a limit.
    """
    _return_freed_memory()
    limit = data_bytes() + limit_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY and limit > hard:
        raise HardwareError(
            f"--memory-limit {limit_bytes}: this shell allows {hard - data_bytes()} bytes more.",
            "Give a smaller limit, or raise the shell's (`ulimit -d`).",
        )
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    except (OSError, ValueError) as error:
        raise HardwareError(f"--memory-limit: this system refuses it ({error}).") from error


def _return_freed_memory() -> None:
    """Else glibc keeps freed tensors and samples in pieces that others do not fit into: how many
    depends on the batch, one of 173 ran where one of 169 did not."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MAPPED_ALONE_BYTES)


def data_bytes() -> int:
    """Private writable memory of this process, as RLIMIT_DATA counts it."""
    return _status("VmData")


def resident_bytes() -> tuple[int, int]:
    """This process' resident memory now, and the most it has been."""
    return _status("VmRSS"), _status("VmHWM")


def host_memory_bytes() -> int:
    """Memory of this machine, or of the container it is."""
    import psutil

    total = int(psutil.virtual_memory().total)
    container = Path("/sys/fs/cgroup/memory.max")
    try:
        return min(total, int(container.read_text()))
    except (OSError, ValueError):
        return total


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    return 0
