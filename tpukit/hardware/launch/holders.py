"""Processes that hold a TPU: its runtime lets one process at a time open the chips.

A driver frees them some time after the end of a process: the next one waits, or tries again.
"""

import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tpukit.errors import HardwareError
from tpukit.hardware.host import Host

LOCK_FILE = "/tmp/libtpu_lockfile"
SECONDS_TO_FREE = 60.0
"""Time limit of waiting for the chips, in seconds."""
SECONDS_BETWEEN_LOOKS = 0.5
PAUSES = (5.0, 15.0)
"""Seconds before a new process tries again to open chips that were busy."""
BUSY = re.compile(
    r"TPU is busy|Device or resource busy|already in used? by|Couldn't open (?:device|iommu group)"
)
"""Texts of the errors from opening a TPU that another process holds."""


@dataclass(frozen=True)
class Holder:
    """A process that has a device or libtpu's lock file open."""

    pid: int
    name: str
    path: str
    is_own_kernel: bool
    """The notebook kernel that this process runs in."""


def find_holders(host: Host, paths: Sequence[str]) -> tuple[Holder, ...]:
    """Processes that have one of these open, as far as /proc shows them to this user."""
    ancestors = _ancestors(host)
    found = []
    for name in host.names("/proc"):
        pid = int(name) if name.isdigit() else 0
        if pid and pid != host.process:
            path = _held_path(host, pid, paths)
            if path:
                program = process_name(host, pid)
                is_kernel = pid in ancestors and "ipykernel" in program
                found.append(Holder(pid, program, path, is_kernel))
    return tuple(found)


def _held_path(host: Host, pid: int, paths: Sequence[str]) -> str | None:
    links = (host.link(f"/proc/{pid}/fd/{fd}") for fd in host.names(f"/proc/{pid}/fd"))
    return next((link for link in links if link in paths), None)


def wait_until_free(host: Host, paths: Sequence[str], seconds: float = SECONDS_TO_FREE) -> None:
    """Waits until no other process has one of these open, `seconds` at most.

    Processes that this one was started by are not waited for.
    """
    deadline, said = time.monotonic() + seconds, False
    while holders := [h for h in find_holders(host, paths) if h.pid not in _ancestors(host)]:
        if time.monotonic() >= deadline:
            return
        if not said:
            holder, said = holders[0], True
            text = f"Waiting up to {seconds:.0f} s for process {holder.pid} ({holder.name})"
            print(f"{text} to give the TPU back ...", file=sys.stderr, flush=True)
        time.sleep(SECONDS_BETWEEN_LOOKS)


@contextmanager
def busy_named() -> Iterator[None]:
    """Turns the runtime's error about a TPU that is held into a HardwareError."""
    try:
        yield
    except RuntimeError as error:
        if not BUSY.search(str(error)):
            raise
        raise HardwareError(
            "--hw tpu: the TPU is busy; one process at a time can open it.",
            "`tpukit doctor` names the process that holds it. Where none does, this system lets"
            " only the first process open it: --kernels off leaves it to the run.",
            id="tpu-busy",
        ) from error


def process_name(host: Host, pid: int) -> str:
    """A process' program and, for Python, its module or script: the rest may hold secrets."""
    words = (host.read(f"/proc/{pid}/cmdline") or "").split("\0")
    program, flags = words[0], [word for word in words[1:4] if word]
    if not program:
        return (host.read(f"/proc/{pid}/comm") or "?").strip()
    if not Path(program).name.startswith("python") or not flags:
        return program
    shown = flags[:2] if flags[0] == "-m" else flags[:1]
    return " ".join([program, *shown]) if shown[0] == "-m" or shown[0][:1] != "-" else program


def _ancestors(host: Host) -> set[int]:
    """This process' parents, up to the first."""
    pid, found = host.process, set[int]()
    while pid > 1 and pid not in found:
        found.add(pid)
        match = re.search(r"^PPid:\s*(\d+)", host.read(f"/proc/{pid}/status") or "", re.MULTILINE)
        pid = int(match.group(1)) if match else 0
    return found
