"""Attacks by what is missing: disk, file handles, shared memory, home, compiler, the time."""

import ctypes
import os
import random
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from runs import SUPPORT

from campaign.commands import TRAIN, check, finish, start, succeed, told_in, wait
from campaign.processes import content, whole

NOWHERE = "/proc/none"
NEW_MOUNTS = 0x00020000  # CLONE_NEWNS


class UnavailableError(Exception):
    """This attack cannot be made here."""


@dataclass
class Attack:
    """A training command, a folder for what the attack needs, and what is undone at its end."""

    rng: random.Random
    command: list[str]
    place: Path
    at_end: ExitStack

    def limited(self, kind: int, value: int) -> None:
        started = start(self.command, self.place, limits={kind: value})
        check(wait(started), told_in(self.place))


def starve(number: int) -> None:
    """Attack `number`: a resource that is not there; an error or a whole run, then a whole run."""
    missing = WAYS[number % len(WAYS)]
    with tempfile.TemporaryDirectory() as place, ExitStack() as at_end:
        run = Path(place) / "disk" / "run"
        run.parent.mkdir()
        command = [*TRAIN, "--results-dir", str(run)]
        missing(Attack(random.Random(number), command, Path(place), at_end))
        succeed(command)
        assert content(run) == whole("one process")[0], f"{missing.__name__}: other content"


def full_disk(attack: Attack) -> None:
    """A disk that is full after some bytes: at each write of a run, as the numbers go on."""
    disk = attack.place / "disk"
    attack.at_end.enter_context(_mounted(disk, attack.rng.randrange(4, 200) * 4096))
    finish(attack.command)
    subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)


def short_files(attack: Attack) -> None:
    """A limit on the size of files (ulimit -f)."""
    attack.limited(resource.RLIMIT_FSIZE, attack.rng.randrange(1, 60_000))


def no_file_handles(attack: Attack) -> None:
    """A limit on open files (ulimit -n)."""
    attack.limited(resource.RLIMIT_NOFILE, attack.rng.randrange(8, 40))


def tiny_shared_memory(attack: Attack) -> None:
    """A /dev/shm in which the batches of a DataLoader worker find no room."""
    with _mounted(Path("/dev/shm"), attack.rng.randrange(1, 8) * 4096):
        finish([*attack.command, "--num-workers", "1"])


def no_home(attack: Attack) -> None:
    """A home and a cache folder that cannot be written."""
    names = ("HOME", "XDG_CACHE_HOME", "TPUKIT_CACHE_DIR")
    finish(attack.command, dict.fromkeys(names, NOWHERE))


def no_compiler(attack: Attack) -> None:
    """No program is found; `--compile` needs a C++ compiler."""
    compiled = ["--compile", "--results-dir", str(attack.place / "compiled")]
    options = compiled if attack.rng.random() < 0.5 else []
    finish([*attack.command, *options], {"PATH": "/nowhere"})


def no_temporary_folder(attack: Attack) -> None:
    """TMPDIR names a folder that is not there."""
    finish(attack.command, {"TMPDIR": NOWHERE})


def jumping_clock(attack: Attack) -> None:
    """The clock of the day jumps to and fro while the run goes on; the monotonic one does not."""
    if not (compiler := shutil.which("cc")):
        raise UnavailableError("the clock that jumps needs a C compiler")
    library = str(attack.place / "jumping_clock.so")
    source = str(SUPPORT / "jumping_clock.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    seed = str(attack.rng.randrange(10**6))
    succeed(attack.command, {"LD_PRELOAD": library, "CLOCK_JUMPS": seed})


def own_mounts() -> None:
    """Keeps what this process and its children mount to themselves; it goes with them."""
    if os.geteuid() == 0 and ctypes.CDLL(None).unshare(NEW_MOUNTS) == 0:
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)


@contextmanager
def _mounted(folder: Path, size: int) -> Iterator[None]:
    """A memory disk of `size` bytes over `folder`, for this process and its children alone."""
    if os.geteuid() != 0:
        raise UnavailableError("mounting needs root")
    options = f"size={size},mode=1777"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


WAYS: list[Callable[[Attack], None]] = [
    full_disk, short_files, no_file_handles, tiny_shared_memory, no_home, no_compiler,
    no_temporary_folder, jumping_clock,
]  # fmt: skip
