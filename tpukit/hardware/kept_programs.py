"""Compiled programs of a TPU's stack, kept in a folder from one start to the next.

torch_tpu takes what its files hold for programs: other bytes ended the process in the CPU plugin.
A list of checksums beside them says which are whole.
"""

import atexit
import contextlib
import hashlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from tpukit.errors import HardwareError
from tpukit.hardware.tpu_stack import TpuStack
from tpukit.io.files import is_writable, write_file
from tpukit.knowledge.versions import installed_versions

IN_MEMORY = Path("/dev/shm/torch_tpu_cache")
"""The folder of torch_tpu's second tier, which the ranks of a host share."""


@dataclass(frozen=True)
class CheckedFolder:
    """A folder of programs (`*.bin`) with their checksums."""

    path: Path
    versions: str
    """Part of each checksum: a program of other versions is not whole."""

    @property
    def checksums(self) -> Path:
        """A line `checksum  file` for each program."""
        return self.path / "programs.sha256"

    def damaged(self) -> set[str]:
        """Programs whose checksum is another one or is missing: a kill came before it."""
        listed = self._listed()
        return {name for name in self._programs() if self._checksum(name) != listed.get(name)}

    def remove(self, names: set[str]) -> None:
        for name in names:
            (self.path / name).unlink(missing_ok=True)
        self.record()

    def record(self) -> None:
        """Adds programs that are new to the list, and takes off it what was removed."""
        listed = self._listed()
        now = {name: listed.get(name) or self._checksum(name) for name in self._programs()}
        if now != listed:
            lines = "".join(f"{checksum}  {name}\n" for name, checksum in now.items())
            write_file(self.checksums, lines.encode())

    def _programs(self) -> list[str]:
        return [str(file.relative_to(self.path)) for file in self.path.rglob("*.bin")]

    def _checksum(self, name: str) -> str:
        with contextlib.suppress(FileNotFoundError):  # another run has removed it
            content = (self.path / name).read_bytes()
            return hashlib.sha256(self.versions.encode() + content).hexdigest()
        return ""

    def _listed(self) -> dict[str, str]:
        with contextlib.suppress(FileNotFoundError):
            lines = self.checksums.read_text(errors="replace").splitlines()
            return {name: checksum for checksum, _, name in (li.partition("  ") for li in lines)}
        return {}


_WRITTEN: list[CheckedFolder] = []
"""Those that this process may add programs to."""


def keep_programs(folder: Path, stack: TpuStack = "torch_xla") -> None:
    """Has a TPU's stack read and keep programs below `folder`, those of these versions alone.

    Raises HardwareError where there is neither something to read nor a place to write.
    """
    parts = [f"{name}-{found}" for name, found in installed_versions((stack, "libtpu")).items()]
    programs, writable = folder / "-".join(parts), is_writable(folder)
    if not (writable or folder.is_dir()):
        raise HardwareError(
            f"--compile-cache {folder}: it does not exist and cannot be made.",
            "Name a folder you may write, or a former one that is attached.",
            id="compile-cache",
        )
    if writable:
        programs.mkdir(parents=True, exist_ok=True)
    elif not programs.is_dir():
        return
    if stack == "torch_tpu":
        _keep_in_tiers(programs, writable=writable)
        return
    # What torch_xla.runtime.initialize_cache sets.
    os.environ["XLA_PERSISTENT_CACHE_PATH"] = str(programs)
    os.environ["XLA_PERSISTENT_CACHE_READ_ONLY"] = "0" if writable else "1"


def _keep_in_tiers(programs: Path, *, writable: bool) -> None:
    """The third tier is files, the second is in memory; what is damaged in either is not read."""
    name = hashlib.sha256(f"{programs} {os.getuid()}".encode()).hexdigest()[:12]
    in_memory = CheckedFolder(IN_MEMORY / f"tpukit-{name}", programs.name)
    on_disk = CheckedFolder(programs, programs.name)
    _WRITTEN[:] = [in_memory, on_disk] if writable else [in_memory]
    lost, damaged = in_memory.damaged(), on_disk.damaged()
    in_memory.remove(lost)
    if writable:
        on_disk.remove(damaged)
    is_used = writable or not damaged
    if is_used:
        os.environ["TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT"] = str(programs)
    os.environ["TORCH_TPU_TIER2_COMPILATION_CACHE"] = in_memory.path.name
    # Else small programs are compiled beside reading their file, and the faster one is taken.
    os.environ["TORCH_TPU_INTERNAL_TIER3_COMPILATION_CACHE_LOCAL_BACKUP_TASK"] = "0"
    atexit.register(record_programs)
    if (count := len(lost | damaged)) and os.environ.get("LOCAL_RANK", "0") == "0":
        then = "they are compiled again" if is_used else "it is read-only, and not used"
        found = f"{count} programs kept in {programs} are damaged or unfinished: {then}"
        print(f"Note: {found}.", file=sys.stderr, flush=True)


def record_programs() -> None:
    """Lists what this process has added, so that the next start takes it for whole."""
    for folder in _WRITTEN:
        # A full disk, say: what is not listed is compiled again.
        with contextlib.suppress(OSError):
            folder.record()
