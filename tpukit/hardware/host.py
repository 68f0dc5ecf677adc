"""The seam between detection and the machine: files, links, packages, programs, ports.

What cannot be read is None or empty: no member raises or hangs.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tpukit.io.files import is_writable
from tpukit.io.process import allowed_cores, end_group

_MOST_BYTES = 1 << 20


class Disk(NamedTuple):
    """A file system, in bytes."""

    total: int
    free: int


class Host:
    """This machine, as far as detection and `doctor` read it; tests play others."""

    def __init__(self) -> None:
        self.environment: Mapping[str, str] = os.environ
        self.python = "{}.{}.{}".format(*sys.version_info[:3])
        """Its version."""
        self.system = "{0.sysname}-{0.machine}".format(os.uname())
        """`Linux-x86_64`."""
        self.cores = allowed_cores()
        """Cores this process may use."""
        self.process = os.getpid()
        """This process' id."""

    def read(self, path: str) -> str | None:
        """A small text file; None where it is not there or not readable."""
        try:
            with open(path, "rb") as file:  # noqa: PTH123 - pathlib costs a tenth of --quick
                return file.read(_MOST_BYTES).decode("utf-8", errors="replace")
        except OSError:
            return None

    def names(self, path: str) -> list[str]:
        """What a folder holds, in order; nothing where there is none."""
        try:
            return sorted(os.listdir(path))  # noqa: PTH208
        except OSError:
            return []

    def link(self, path: str) -> str | None:
        """Where a symbolic link points."""
        try:
            return os.readlink(path)  # noqa: PTH115
        except OSError:
            return None

    def exists(self, path: str) -> bool:
        """Whether there is such a file, folder or device."""
        return os.path.lexists(path)

    def run(self, command: Sequence[str], seconds: float) -> str | None:
        """A program's standard output; None where it is not there, fails or takes longer."""
        try:
            with subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            ) as child:
                return _output(child, seconds)
        except OSError:
            return None

    def disk(self, path: str) -> Disk | None:
        """The file system that holds a path (or will: the nearest folder that exists)."""
        folder = Path(path).absolute()
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        try:
            stats = os.statvfs(folder)
        except OSError:
            return None
        return Disk(stats.f_frsize * stats.f_blocks, stats.f_frsize * stats.f_bavail)

    def is_writable(self, folder: str) -> bool:
        """Whether this process can make files in a folder, or make that folder."""
        return is_writable(Path(folder))

    def finds(self, program: str) -> bool:
        """Whether a program is on the search path."""
        return shutil.which(program) is not None

    def packages(self) -> Mapping[str, str]:
        """Versions of installed distributions by their normalised names, from their metadata."""
        found: dict[str, str] = {}
        for folder in sys.path:
            for name in self.names(folder or "."):
                if name.endswith((".dist-info", ".egg-info")):
                    package, _, version = name.rpartition(".")[0].partition("-")
                    found.setdefault(normalise(package), version.partition("-py")[0])
        return found

    def package_text(self, path: str) -> str | None:
        """A file of an installed package, `torch/version.py`; the package is not imported."""
        texts = (self.read(f"{folder}/{path}") for folder in sys.path if folder)
        return next((text for text in texts if text is not None), None)

    def reaches(self, name: str, port: int, seconds: float) -> bool:
        """Whether a server on the network answers."""
        # A name look-up cannot be interrupted, so a process that can be killed does it.
        code = (
            "import socket,sys;"
            "socket.create_connection((sys.argv[1],int(sys.argv[2])),float(sys.argv[3])).close();"
            "print('reached')"
        )
        command = [sys.executable, "-I", "-S", "-c", code, name, str(port), str(seconds)]
        return "reached" in (self.run(command, seconds + 0.5) or "")


def normalise(package: str) -> str:
    """A distribution's name as package indexes compare it: `torch_xla` is `torch-xla`."""
    return re.sub(r"[-_.]+", "-", package).lower()


def cuda_build(version_file: str | None) -> str | None:
    """The CUDA version in the text of `torch/version.py`; None for a build without."""
    match = re.search(r"^cuda\b[^=\n]*=\s*'([\d.]+)'", version_file or "", re.MULTILINE)
    return match.group(1) if match else None


def _output(child: subprocess.Popen[bytes], seconds: float) -> str | None:
    try:
        output, _ = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        if child.stdout is not None:
            child.stdout.close()
        end_group(child, 1.0)
        return None
    return output.decode("utf-8", errors="replace") if child.returncode == 0 else None
